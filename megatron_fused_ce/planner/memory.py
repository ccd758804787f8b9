"""Bytes of a head's own buffers, moment by moment: what a plan depends on, and the sums for each strategy.

Needs neither torch nor a device. Letters: the package's own (``T`` tokens of the tensor-parallel group, ``H``
hidden size, ``V`` vocabulary rows of this rank, ``C`` tokens of the largest chunk, ``e`` bytes of a hidden
state). Beside inputs, ``grad_hidden`` and the wgrad accumulator::

    store            e*T*V kept
    grad_in_forward  e*C*V + 4*V*H kept  (R > 1: 2*e*C*V)
    mixed            e*(stored tokens)*V kept, e*C*V
    recompute        e*C*V

and for each the smaller parts that :class:`Memory` names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.kernels.sizes import HALF_TILE_ROWS, SAMPLED_ROWS, TILE_COLUMNS
from megatron_fused_ce.planner.chunks import Cut

MIB = 2**20
#: Bytes of an element, by torch's name of the dtype.
ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
#: Wgrad accumulators: an fp32 buffer that takes every chunk in place, a buffer of a lower precision, a tensor
#: returned to autograd in the weight's dtype, or none (a frozen weight).
WGRAD_ACCUMULATORS = ("main_grad", "low_main_grad", "returned", "none")
LOGITS_BACKENDS = ("scaled_exp", "gemm_rows")
#: The scaled-exp GEMM keeps a sum and a maximum (fp32) of each token and tile of 256 columns, and
#: a mark (int32) of each 64 tokens and tile; mostly one sum more where it saves logits.
TILE_BYTES = 8
TOKENS_PER_MARK_BYTE = HALF_TILE_ROWS // 4
#: A token's label (int64), four saved statistics, its loss and its factor in the backward (fp32).
TOKEN_BYTES = 8 + 4 * 4 + 4 + 4
#: The same for the current chunk, copied for it: label, merged statistics, factor; and three floats a token
#: that a GEMM reads.
CHUNK_TOKEN_BYTES = 8 + 4 * 4 + 4 + 3 * 4
#: Of several labels a token (:mod:`.logits.label_set`), each: its column (int32), log-probability and the
#: caller's copy, its logit or its share of the upstream gradient (fp32). Of the current chunk: indices
#: (int64) and floats by which its entry is gathered and written.
LABEL_BYTES, CHUNK_LABEL_BYTES = 4 + 3 * 4, 72
#: A token's statistics of one shard (fp32). A packed merge holds this rank's and those of all ranks; one by
#: all-reduces holds at most 36 bytes, never more.
SHARD_BYTES = 4 * 4
#: Floats of a chunk's token beside a teacher: the statistics of both sides and what they are merged to,
#: perhaps at two temperatures (four times :data:`SHARD_BYTES`), and parts of its divergence.
TEACHER_TOKEN_BYTES = 4 * 80
#: cuBLAS's workspace, as torch allocates it on Hopper: one for the forward's thread and one for autograd's,
#: shared with the rest of the model.
WORKSPACE_BYTES = 2 * 32 * MIB
#: Megatron's own losses, at their peak, for each of the T * V logits: unfused the fp32 softmax (4) and, where
#: logits are not fp32, they or their gradient (2); its native fusion the softmax and its gradient in fp32,
#: and the gradient in bf16 (4 + 4 + 2). Of each further use that waits for its backward: the softmax (4).
#: Measured: docs/benchmarks/results/2026-11-21-h200-reach-llama3-8b.json.
STOCK_BYTES_PER_LOGIT = {"unfused": 6, "native": 10}
STOCK_BYTES_WAITING = 4
#: torch's allocator takes buffers from 10 MiB on in steps of 2 MiB and does not split off the last one.
ROUNDED_FROM = 10 * MIB
ROUNDING_BYTES = MIB


@dataclass(frozen=True)
class PlanInputs:
    """Everything that a plan depends on. ``ValueError`` if a field does not fit.

    Ranks with the same inputs get the same plan: if vocabulary shards differ in size, give the largest as
    ``num_rows`` on all ranks.
    """

    #: ``T``, over the tensor-parallel group; 0 is fine
    num_tokens: int
    #: ``H``
    hidden_size: int
    #: ``V`` of the largest shard
    num_rows: int
    #: torch's name: bfloat16, float16 or float32
    dtype: str = "bfloat16"
    #: ranks whose parts make up one chunk: ``tp_size`` with sequence parallelism, else 1
    num_parts: int = 1
    tp_size: int = 1
    #: one of :data:`WGRAD_ACCUMULATORS`
    wgrad_accumulator: str = "main_grad"
    #: whether the forward is given token weights, without which ``auto`` never takes ``grad_in_forward``
    token_weights_known: bool = False
    #: whether the loss was found not to be what ``grad_in_forward`` was promised
    promise_broken: bool = False
    #: the logits backend, one of :data:`LOGITS_BACKENDS`
    logits_backend: str = "scaled_exp"
    #: whether the scaled-exp GEMM writes logits instead of ``E``
    saves_logits: bool = False
    #: "cpu", or a GPU's name, of which a word may be one of :data:`HOPPER`
    device: str = ""
    #: the user's choices
    config: FusedCEConfig = field(default_factory=FusedCEConfig)
    #: uses of the head whose forwards all come before the backwards: 1, and one for each depth of multi-token
    #: prediction
    uses_in_flight: int = 1
    #: labels of a token, where there are several; 0 for one
    labels_per_token: int = 0
    #: ``H_t`` of a teacher beside the head, and the bytes of its numbers; 0 for none
    teacher_hidden_size: int = 0
    teacher_itemsize: int = 0

    def __post_init__(self) -> None:
        allowed = {
            "dtype": tuple(ITEMSIZES),
            "wgrad_accumulator": WGRAD_ACCUMULATORS,
            "logits_backend": LOGITS_BACKENDS,
        }
        for name, choices in allowed.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(choices)}")
        for name in (
            "num_tokens",
            "hidden_size",
            "num_rows",
            "num_parts",
            "tp_size",
            "uses_in_flight",
            "labels_per_token",
            "teacher_hidden_size",
        ):
            value = getattr(self, name)
            smallest = int(name in ("hidden_size", "num_rows", "num_parts", "tp_size", "uses_in_flight"))
            if value < smallest:
                raise ValueError(f"{name} must be {smallest} or more, got {value}")
        if self.num_parts not in (1, self.tp_size):
            raise ValueError(
                f"num_parts is {self.num_parts} with tp_size {self.tp_size}; expected tp_size with "
                "sequence parallelism, else 1"
            )

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.dtype]

    @property
    def logits_itemsize(self) -> int:
        """Bytes of an entry of the matrix that the logits GEMM writes; ``E`` has the hidden states' dtype."""
        return 4 if self._in_fp32 and not self.teacher_hidden_size else self.itemsize

    @property
    def _in_fp32(self) -> bool:
        return self.config.logit_precision == "fp32" and self.logits_backend == "gemm_rows"

    @property
    def teacher_bytes(self) -> int:
        """Bytes of a token's logits and hidden states that live beside a teacher: of its own, and of the
        student's where they are fp32 and their gradient is not."""
        if not self.teacher_hidden_size:
            return 0
        logits = (4 + 4 * (self.itemsize < 4)) if self._in_fp32 else self.teacher_itemsize
        hidden = self.teacher_itemsize * self.teacher_hidden_size if self.num_parts > 1 else 0
        return logits * self.num_rows + hidden + TEACHER_TOKEN_BYTES

    @property
    def saves_e(self) -> bool:
        """Whether the saved matrix gets its rows' factors later: ``E``, or the gradient of a divergence."""
        if self.teacher_hidden_size:
            return self.dtype != "float16"
        return self.logits_backend == "scaled_exp" and not self.saves_logits


class Memory(NamedTuple):
    """Bytes of the head's own buffers at one moment, part by part; 0 for a part that it does not have."""

    #: logits of the current chunk, then their gradient (beside them if they are fp32); of two chunks in
    #: ``grad_in_forward`` over several ranks (``store`` with the scaled-exp GEMM works in the stored ones)
    chunk_logits: int = 0
    #: logits saved for the backward
    kept_logits: int = 0
    #: fp32 sum of ``grad_weight`` beside the wgrad accumulator
    grad_weight_sum: int = 0
    #: the current chunk of a teacher: its logits, and its hidden states with sequence parallelism
    teacher: int = 0
    #: all of this rank's hidden states of a teacher, copied where the backward reads them
    teacher_copy: int = 0
    #: hidden states of one chunk times their row factor, for the GEMM with ``E``; with sequence parallelism
    #: the gathered ones are multiplied in place
    scaled_hidden: int = 0
    #: tile statistics and tile table of each chunk that the scaled-exp GEMM has computed and that is not
    #: finalized yet
    tile_statistics: int = 0
    #: with sequence parallelism: gathered chunks of hidden states, being read or received (3 in
    #: grad_in_forward, else 2), or gathered last and saved for the backward
    gathered_hidden: int = 0
    #: with sequence parallelism: a chunk's ``grad_hidden`` before its reduction
    unreduced_grad_hidden: int = 0
    #: over several ranks: statistics of two chunks, own and of all ranks
    merge_buffers: int = 0
    #: over several ranks: the sampled rows of the whole weight, for row shifts
    sampled_rows: int = 0
    #: labels, statistics, loss
    token_floats: int = 0
    #: cuBLAS's
    workspace: int = 0
    #: the allocator's rounding, at most, of saved and of chunk buffers
    rounding: int = 0

    @property
    def total(self) -> int:
        return sum(self)


def peak_memory(
    inputs: PlanInputs, strategy: str, cut: Cut, stored_chunks: int, wgrad_at_once: bool = False
) -> Memory:
    """Predicted peak of a strategy in these chunks, of which the first ``stored_chunks`` are stored.

    The larger of forward (with tile statistics) and backward (with scaled hidden states). The backward of
    ``grad_in_forward`` needs memory only where its gradients must be made again, less than its forward.
    """
    forward = forward_memory(inputs, strategy, cut, stored_chunks)
    if strategy == "grad_in_forward":
        backward = remade_memory(inputs, cut)
    else:
        backward = backward_memory(inputs, cut, stored_chunks, wgrad_at_once)
    return max(forward, backward, key=lambda memory: memory.total)


def forward_memory(inputs: PlanInputs, strategy: str, cut: Cut, stored_chunks: int) -> Memory:
    """The forward's peak.

    Over several ranks the next chunk's GEMM runs beside each chunk (:mod:`.overlap`), so buffers needed
    after a chunk's own GEMM exist twice, if there are two chunks.
    """
    count, capacity, ranks = cut.count, inputs.num_parts * cut.longest, inputs.tp_size
    chunk = _ChunkBytes.of(inputs, capacity)
    exp, grad_in_forward = inputs.logits_backend == "scaled_exp", strategy == "grad_in_forward"
    trained = inputs.wgrad_accumulator != "none"
    beside = inputs.teacher_hidden_size > 0
    under_way = min(count, 2 if ranks > 1 and not beside else 1)
    shard_bytes = (4 if beside else 1) * SHARD_BYTES
    finalizes = grad_in_forward or stored_chunks > 0
    num_logits = under_way if grad_in_forward else int((beside or not exp) and stored_chunks < count)
    sampled = ranks * -(-SAMPLED_ROWS // ranks)
    gathered = min(count, 2) + _waiting(inputs, count, stored_chunks) * (inputs.uses_in_flight - 1)
    if grad_in_forward:
        gathered = min(count, 3)
    return Memory(
        chunk_logits=num_logits * chunk.logits + (chunk.gradients if grad_in_forward else 0),
        kept_logits=kept_bytes(inputs, stored_tokens_of(inputs, cut, stored_chunks)),
        grad_weight_sum=_sum_bytes(inputs) * inputs.uses_in_flight if grad_in_forward and trained else 0,
        teacher=inputs.teacher_bytes * capacity,
        scaled_hidden=chunk.scaled if grad_in_forward else 0,
        tile_statistics=(under_way if finalizes else min(count, 1)) * chunk.tiles + chunk.marks,
        gathered_hidden=gathered * chunk.gathered,
        unreduced_grad_hidden=chunk.gathered if grad_in_forward else 0,
        merge_buffers=under_way * shard_bytes * (1 + ranks) * capacity if ranks > 1 else 0,
        sampled_rows=inputs.itemsize * sampled * inputs.hidden_size if exp and ranks > 1 and count else 0,
        **_always(inputs, capacity, chunk, stored_chunks, num_logits),
    )


def backward_memory(
    inputs: PlanInputs, cut: Cut, stored_chunks: int, wgrad_at_once: bool = False, keeps_last: bool = True
) -> Memory:
    """The backward's peak of ``store``, ``recompute`` and ``mixed``, which run the last chunk first.

    ``keeps_last``: whether the forward left that chunk's gathered hidden states.
    """
    count, capacity = cut.count, inputs.num_parts * cut.longest
    chunk = _ChunkBytes.of(inputs, capacity)
    saves_e = inputs.saves_e
    again, frozen = stored_chunks < count, inputs.wgrad_accumulator == "none"
    num_logits = int(not saves_e or again)
    # The chunk saved by the forward stays unchanged; beside it are the gathered ones and its scaled copy.
    waiting = _waiting(inputs, count, stored_chunks) if keeps_last else 0
    ring = count - stored_chunks if frozen else count
    if frozen or again or not saves_e:
        ring -= waiting
    scales = stored_chunks or inputs.teacher_hidden_size
    gathered, scaled = min(ring, 2) * chunk.gathered, chunk.scaled if scales else 0
    if wgrad_at_once:
        # Hidden states of all tokens, scaled, beside E of all.
        every = inputs.itemsize * inputs.num_tokens * inputs.hidden_size
        gathered, scaled = (every, 0) if inputs.num_parts > 1 else (0, every)
    sums = sums_grad_weight(inputs, min(count, 1) if wgrad_at_once else count)
    of_teacher = inputs.teacher_itemsize * inputs.teacher_hidden_size * inputs.uses_in_flight
    # Logits exist beside gradients of another dtype only if they are recomputed.
    logits = (num_logits if again or not chunk.gradients else 0) * chunk.logits
    return Memory(
        chunk_logits=logits + chunk.gradients,
        kept_logits=kept_bytes(inputs, stored_tokens_of(inputs, cut, stored_chunks)),
        grad_weight_sum=_sum_bytes(inputs) if sums else 0,
        teacher=inputs.teacher_bytes * capacity if again else 0,
        teacher_copy=of_teacher * (inputs.num_tokens // inputs.num_parts) if again else 0,
        scaled_hidden=scaled,
        tile_statistics=chunk.marks if again else 0,
        gathered_hidden=gathered + waiting * inputs.uses_in_flight * chunk.gathered,
        unreduced_grad_hidden=(min(count, 2) if wgrad_at_once else 1) * chunk.gathered,
        **_always(inputs, capacity, chunk, stored_chunks, num_logits),
    )


def remade_memory(inputs: PlanInputs, cut: Cut) -> Memory:
    """The backward's peak of ``grad_in_forward`` where the upstream gradient is not what was promised.

    That of ``recompute``, whose gradients made in the forward are gone; those of other uses of the head wait.
    """
    memory = backward_memory(inputs, cut, 0, keeps_last=False)
    if inputs.wgrad_accumulator == "none":
        return memory
    waiting = (inputs.uses_in_flight - 1) * _sum_bytes(inputs)
    return memory._replace(grad_weight_sum=memory.grad_weight_sum + waiting)


class _ChunkBytes(NamedTuple):
    """Bytes of one buffer of each kind, for the largest chunk."""

    logits: int
    gradients: int  # of the logits; 0 where they take the logits' buffer
    gathered: int  # 0 without sequence parallelism
    scaled: int  # 0 where gathered hidden states are scaled in place, or nothing is scaled
    tiles: int
    marks: int

    @staticmethod
    def of(inputs: PlanInputs, capacity: int) -> _ChunkBytes:
        exp, gathers = inputs.logits_backend == "scaled_exp", inputs.num_parts > 1
        hidden = inputs.itemsize * capacity * inputs.hidden_size
        tiles = capacity * math.ceil(inputs.num_rows / TILE_COLUMNS) if exp else 0
        entries, shared = capacity * inputs.num_rows, inputs.logits_itemsize == inputs.itemsize
        return _ChunkBytes(
            logits=inputs.logits_itemsize * entries,
            gradients=0 if shared else inputs.itemsize * entries,
            gathered=hidden if gathers else 0,
            scaled=hidden if inputs.saves_e and inputs.wgrad_accumulator != "none" and not gathers else 0,
            tiles=(TILE_BYTES + (4 if inputs.saves_logits else 0)) * tiles,
            marks=math.ceil(tiles / TOKENS_PER_MARK_BYTE),
        )


def _waiting(inputs: PlanInputs, count: int, stored_chunks: int) -> int:
    """Number of gathered chunks of hidden states that a forward saves for its backward: 1 (the last) or 0."""
    if inputs.promise_broken:
        return 0  # Plan.saves_last_hidden
    return int(count > 0 and (inputs.wgrad_accumulator != "none" or stored_chunks < count))


def kept_bytes(inputs: PlanInputs, stored_tokens: int) -> int:
    return inputs.logits_itemsize * stored_tokens * inputs.num_rows * inputs.uses_in_flight


def _own_hidden_bytes(inputs: PlanInputs) -> int:
    return inputs.itemsize * inputs.num_tokens // inputs.num_parts * inputs.hidden_size


def _sum_bytes(inputs: PlanInputs) -> int:
    return 4 * inputs.num_rows * inputs.hidden_size


def _always(
    inputs: PlanInputs, capacity: int, chunk: _ChunkBytes, stored_chunks: int, num_logits: int
) -> dict[str, int]:
    """The parts that forward and backward share, with ``num_logits`` buffers of a chunk's logits."""
    on_gpu, labels = inputs.device != "cpu", inputs.labels_per_token
    large = stored_chunks * inputs.uses_in_flight + max(1, num_logits)
    return {
        "token_floats": (TOKEN_BYTES + LABEL_BYTES * labels) * inputs.num_tokens * inputs.uses_in_flight
        + (CHUNK_TOKEN_BYTES + CHUNK_LABEL_BYTES * labels) * capacity,
        "workspace": WORKSPACE_BYTES if on_gpu else 0,
        "rounding": ROUNDING_BYTES * large if on_gpu and chunk.logits >= ROUNDED_FROM else 0,
    }


def sums_grad_weight(inputs: PlanInputs, count: int) -> bool:
    """Whether the backward sums in an fp32 buffer before the wgrad accumulator: see ``wgrad.py``."""
    scaled = inputs.dtype == "float16"
    if inputs.wgrad_accumulator == "returned":
        # Without a chunk the sum is zeros.
        return inputs.dtype != "float32" and (count != 1 or scaled)
    return inputs.wgrad_accumulator == "low_main_grad" or (inputs.wgrad_accumulator == "main_grad" and scaled)


def stored_tokens_of(inputs: PlanInputs, cut: Cut, stored_chunks: int) -> int:
    return inputs.num_parts * cut.tokens_of(stored_chunks)


def size_in_words(num_bytes: int) -> str:
    """A size for people: tenths of a GiB, whole MiB below one GiB, tenths below 10 MiB."""
    if num_bytes >= 1024 * MIB:
        return f"{num_bytes / 1024 / MIB:.1f} GiB"
    return f"{num_bytes / MIB:.{0 if num_bytes >= 10 * MIB else 1}f} MiB"
