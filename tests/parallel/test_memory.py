"""The buffers of logits and hidden states that the planner counts, against those that a call holds."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_fused_ce import FusedCEConfig, fused_linear_cross_entropy
from megatron_fused_ce.logits import rows_torch
from megatron_fused_ce.planner import memory
from megatron_fused_ce.planner.chunks import Cut
from tests.support.op import STRATEGIES
from tests.support.ranks import Rank, on_ranks

#: A shard and a chunk whose buffers differ in shape, also from samples and merges: seven tiles of columns on
#: a GPU; on a CPU six, by one of tokens, as the interpreter takes a moment for each.
H, V, C = (16, 1600, 40) if torch.cuda.is_available() else (16, 384, 24)
Shape = tuple[Any, ...]  # a dtype and the lengths
#: Four chunks: more than any ring of buffers has room for.
CASES: dict[str, dict[str, Any]] = {
    "": {},
    "sp": {"sp": True},
    "one chunk, sp": {"sp": True, "num_chunks": 1},
    "frozen weight, sp": {"sp": True, "trained": False},
    "logits in fp32": {"logit_precision": "fp32"},
}


class Storages(TorchDispatchMode):
    """The most storages that were alive together, by the dtype and shape that each was made for."""

    def __init__(self) -> None:
        super().__init__()
        self.peak: Counter[Shape] = Counter()
        self._live: Counter[Shape] = Counter()
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def reset(self) -> None:
        self.peak = Counter(self._live)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tensors((args, kwargs))}
        for tensor in tensors(result):
            storage, shape = tensor.untyped_storage(), (tensor.dtype, *tensor.shape)
            key = storage._cdata
            if key in self._seen or key in given:
                continue
            self._seen[key] = weakref.ref(storage, functools.partial(self._gone, key, shape))
            self._live[shape] += 1
            if {C, H} & set(shape) and self._live[shape] > max(self.peak[shape], 1):
                gc.collect()  # Triton's interpreter leaves cycles that hold its arguments
            self.peak[shape] = max(self.peak[shape], self._live[shape])
        return result

    def _gone(self, key: int, shape: Shape, _: object) -> None:
        self._seen.pop(key)
        self._live[shape] -= 1


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@on_ranks(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["scaled_exp", "gemm_rows"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_buffers(rank: Rank, strategy, backend, case):
    """Of a forward and of a backward, that of grad_in_forward for another upstream gradient than promised."""
    if backend == "scaled_exp" and "logit_precision" in CASES[case]:
        pytest.skip("its logits are in fp32 anyway")
    # Row kernels in plain PyTorch work in copies of fewer rows than a chunk has.
    with patch.object(rows_torch, "BLOCK_ELEMENTS", 8 * V):
        peaks_are_as_predicted(rank, strategy, backend, **CASES[case])


def peaks_are_as_predicted(
    rank: Rank, strategy: str, backend: str, sp=False, num_chunks=4, trained=True, logit_precision="auto"
) -> None:
    # What the scaled-exp GEMM runs in: bf16 on GPUs, fp32 by Triton's interpreter.
    lower = rank.device.type == "cuda" or logit_precision == "fp32"
    dtype = torch.bfloat16 if lower else torch.float32
    num_tokens, parts = num_chunks * C, rank.size if sp else 1
    generator = torch.Generator().manual_seed(rank.rank)
    hidden, weight = (
        torch.randn(size, H, generator=generator).to(rank.device, dtype) for size in (num_tokens // parts, V)
    )
    hidden.requires_grad_()
    weight.requires_grad_(trained)
    # The same on every rank.
    labels = torch.arange(num_tokens, device=rank.device) % (rank.size * V)
    weights = torch.rand(num_tokens, generator=torch.Generator().manual_seed(9)).to(rank.device)
    config = FusedCEConfig(
        strategy, chunk_tokens=C, logits_backend=backend, logit_precision=logit_precision, merge="packed"
    )
    inputs = memory.PlanInputs(
        config=config,
        num_tokens=num_tokens,
        hidden_size=H,
        num_rows=V,
        dtype=str(dtype).removeprefix("torch."),
        num_parts=parts,
        tp_size=rank.size,
        wgrad_accumulator="returned" if trained else "none",
        token_weights_known=True,
        logits_backend=backend,
        device="cpu",
    )
    in_forward, stored = strategy == "grad_in_forward", num_chunks if strategy == "store" else 0
    facts = inputs, Cut.of_length(num_tokens // parts, C // parts), stored, in_forward
    at_once = strategy == "store" and inputs.saves_e and trained
    predicted = [memory.memory_of(*facts, at_once, backward=backward) for backward in (False, True)]

    def head() -> torch.Tensor:
        return fused_linear_cross_entropy(
            hidden, weight, labels, tp_group=rank.group, sequence_parallel=sp, config=config,
            token_weights=weights, vocab_start=rank.rank * V,
        )  # fmt: skip

    # grad_hidden is not the head's own: it may have the shape of a chunk's hidden states, or of all.
    alike = hidden.shape[0] // C if hidden.shape[0] in (C, num_tokens) else 0
    with warnings.catch_warnings(action="ignore"), Storages() as seen:
        loss = head()
        compare("forward", inputs, seen.peak, predicted[0], alike * in_forward)
        gc.collect()  # as above
        seen.reset()
        loss.backward(weights.square() if in_forward else weights)
    compare("backward", inputs, seen.peak, predicted[1], alike)
    assert not in_forward or seen.peak[torch.float32, V, H] == trained


def compare(
    when: str, inputs: memory.PlanInputs, seen: Counter[Shape], predicted: memory.Memory, alike: int
) -> None:
    """``alike``: buffers of the caller that have the shape of hidden states."""
    ranks, e, dtype = inputs.tp_size, inputs.itemsize, getattr(torch, inputs.dtype)
    samples = int(when == "forward" and inputs.logits_backend == "scaled_exp")
    sampled = ranks * -(-memory.SAMPLED_ROWS // ranks)
    hidden = predicted.hidden_states - samples * e * sampled * H
    logits = predicted.chunk_logits + predicted.stored_logits
    chunks = inputs.num_tokens // C

    def of_tokens(width: int) -> int:
        """Buffers of a chunk, and those of all chunks in one."""
        of_all = chunks * seen[dtype, chunks * C, width] if chunks > 1 else 0
        return seen[dtype, C, width] + of_all

    in_fp32 = 0 if e == 4 else 4 / e * seen[torch.float32, C, V]
    counted = {
        "[C, V]": (of_tokens(V) + in_fp32, logits / (e * C * V)),
        "[C, H]": (of_tokens(H) - alike, hidden / (e * C * H)),
        "samples": (seen[dtype, sampled, H], samples),
    }
    wrong = {name: pair for name, pair in counted.items() if pair[0] != pair[1]}
    assert not wrong, f"{when}, (there, predicted): {wrong}"
