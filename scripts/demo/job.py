"""What `make demo` trains, and what it measures: the words between it and its ranks. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 1024 * 1024


@dataclass(frozen=True)
class Job:
    """What to train, on what, and where to write the measurements."""

    device: str  # "cpu" or "cuda"
    tokens: str  # path of a .npy file with the token ids of the text
    results: str  # path of the JSON file to write
    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    seq_length: int
    micro_batch: int  # sequences
    num_steps: int
    num_chunks: int  # of the fused loss
    learning_rate: float
    seed: int = 1234

    @property
    def step_tokens(self) -> int:
        return self.seq_length * self.micro_batch


@dataclass
class Run:
    """One training run as measured."""

    name: str
    losses: list[float] = field(default_factory=list)  # mean over the step's tokens, from fp64
    step_ms: list[float] = field(default_factory=list)
    logits_peak_bytes: int = 0  # live storages, the rank that held most
    logits_storages: int = 0  # how many the tracker counted: 0 would mean that it saw nothing
    device_peak_bytes: int = 0  # torch.cuda.max_memory_allocated, 0 on a CPU
    heads_fused: int = 0
    logits_materialised: int = 0
    heads_stock: int = 0
