"""Which strategy, and how many tokens a chunk: a pure function of shapes, dtype, device and budget.

Needs neither torch nor a device, so the op, the Megatron adapter and the command line use the same function.
Letters: the package's own (``T`` tokens of the tensor-parallel group, ``H`` hidden size, ``V`` vocabulary
rows of this rank, ``C`` tokens of the largest chunk, ``e`` bytes of a hidden state).

::

    python -m megatron_fused_ce plan-head --tokens 32768 --hidden 4096 --vocab 128256 --memory-mb 2048

Bytes and GEMMs of a plan, beside inputs, ``grad_hidden`` and the wgrad accumulator::

    store            e*T*V kept          3 GEMMs
    grad_in_forward  e*C*V + 4*V*H kept  3 GEMMs and one pass over grad_weight (R > 1: 2*e*C*V)
    mixed            e*(stored tokens)*V kept, e*C*V; the chunks that are not stored take a 4th GEMM
    recompute        e*C*V               4 GEMMs
      by columns     e*T*B + 4*T*H       4 GEMMs; over one rank, blocks of B columns in the backward

and for each the smaller parts that :class:`Memory` names. Every chunk also reads and writes the fp32
``grad_weight``, every block of columns the fp32 ``grad_hidden``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from megatron_fused_ce.chunking import Cut
from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.kernels.sizes import HALF_TILE_ROWS, SAMPLED_ROWS, TILE_COLUMNS

MIB = 2**20

#: Bytes of an element, by torch's name of the dtype.
ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
#: Wgrad accumulators: an fp32 buffer that takes every chunk in place, a buffer of a lower precision, a tensor
#: returned to autograd in the weight's dtype, or none (a frozen weight).
WGRAD_ACCUMULATORS = ("main_grad", "low_main_grad", "returned", "none")
LOGITS_BACKENDS = ("scaled_exp", "gemm_rows")

#: Tokens of a chunk. T = 32768, chunks of 2048 to 32768 on an H200 (2026-11-21-h200-chunks.md): 8192 is the
#: fastest for each strategy at H = 4096, V = 128256 (store 1.007 of three GEMMs, grad_in_forward 1.016,
#: recompute 0.998 of its four), and within the spread of the fastest at H = 2048, V = 151936. On an H100 the
#: same at H = 4096 (2026-11-23-h100-sweep.md; both in docs/benchmarks/results).
FAST_CHUNK = 8192
#: Words in the names of Hopper GPUs, where that was measured.
HOPPER = frozenset({"Hopper", "H100", "H200", "GH200", "H800", "H20"})
#: On other devices, but for ``store``: 4096 lose 1 to 3 % against 8192 on an H200, with half of the memory.
UNMEASURED_CHUNK = 4096
#: Shortest chunk that is not chosen for memory: 1024 tokens lose 13 to 20 % to the passes over grad_weight.
SHORTEST_FAST_CHUNK = 1024
#: Shortest chunk of ``recompute``, if nothing longer fits; the GEMMs of shorter ones are inefficient.
SHORTEST_CHUNK = 256
#: cuBLAS's tiles of ``grad_weight`` on Hopper, and how many run at once (SMs of H100 and H200). Blocks of
#: columns fill whole rounds of them: at H = 4096 8192 columns took 0.7 % longer than 8448.
GEMM_TILE, TILES_AT_ONCE = (128, 256), 132
#: Chunks that the planner chooses are whole tiles of the GEMMs.
TILE_TOKENS = 128

#: One more chunk takes as long as the three GEMMs of this many tokens, whatever V and H are, since it reads
#: and writes the fp32 grad_weight. 205 is 8 bytes an entry at 4.8 TB/s against 740 TFLOP/s, and what
#: 2026-11-21-h200-sweep-chunks-tp1-main-grad.md shows from 8192 to 1024 tokens; the scaled-exp GEMM's
#: pipeline hides some of it (2026-11-21-h200-chunks.md, 8192 to 2048 tokens). H200, bf16.
ACCUMULATION_TOKENS = {"scaled_exp": 130, "gemm_rows": 205}
#: The same for one byte an entry of an elementwise pass: grad_in_forward's last pass moves 12 in 1.70 ms of
#: 155 (1.58 of 37 at T = 8192, 1.03 of 91 at H = 2048; same tables and 2026-11-21-h200-reach-llama3-8b.md).
SWEEP_TOKENS_PER_BYTE = 355 / 12
#: The row kernels read the logits twice and write them once, which takes (this / H) of the three GEMMs' time
#: (740 TFLOP/s and 4.3 TB/s; 4 % at H = 4096).
ROWS_HIDDEN_SIZE = 172

#: The host waits once in a backward of ``grad_in_forward``, and a GPU then has nothing to do until the host
#: has launched what follows: 0.4 to 0.6 ms for one chunk, 1 ms for several. Of three GEMMs, beside ``store``
#: (one H100, triton 3.6, H = 1024, V = 32064, one call or four in a row): T = 512 7.4 and 5.5, 2048 3.4 and
#: 2.3, 4096 1.8 and 1.2, 8192 (1.6 TFLOP) 1.4 and 1.0, 16384 (3.2 TFLOP) 1.28 and 1.05 with ``recompute`` at
#: 1.43. ``auto`` does without it for a GPU's head of fewer FLOP a call.
SMALLEST_FLOP_TO_WAIT = 3e12
WAITS_IN_WORDS = "grad_in_forward waits for the host in each backward, which a head this small shows"

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
            smallest = 0 if name in ("num_tokens", "labels_per_token", "teacher_hidden_size") else 1
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
    def num_gemms(self) -> float:
        """GEMMs of a step, each as long as the student's logits take."""
        teacher = self.teacher_hidden_size / self.hidden_size
        return (2 if self.wgrad_accumulator == "none" else 3) + teacher

    @property
    def shows_the_wait(self) -> bool:
        """Whether the GEMMs are too short to hide the wait of ``grad_in_forward``."""
        flop = 2 * self.num_gemms * self.num_tokens * self.hidden_size * self.num_rows
        return self.device != "cpu" and flop < SMALLEST_FLOP_TO_WAIT

    @property
    def saves_e(self) -> bool:
        """Whether the saved matrix gets its rows' factors later: ``E``, or the gradient of a divergence."""
        if self.teacher_hidden_size:
            return self.dtype != "float16"
        return self.logits_backend == "scaled_exp" and not self.saves_logits

    @property
    def chunks_asked(self) -> bool:
        return self.config.num_chunks is not None or self.config.chunk_tokens is not None

    def longest_chunk(self, strategy: str) -> int:
        """Tokens of a chunk, if memory does not ask for fewer."""
        if strategy == "store" or not HOPPER.isdisjoint(self.device.split()):
            return FAST_CHUNK
        return UNMEASURED_CHUNK


class OverBudget(ValueError):
    """A strategy named by the user needs more than the budget, however short its chunks."""

    #: the plan that needs the least
    least: Plan

    def __init__(self, message: str, least: Plan) -> None:
        super().__init__(message)
        self.least = least


class Memory(NamedTuple):
    """Bytes of the head's own buffers at one moment, part by part; 0 for a part that it does not have."""

    #: logits of the current chunk, then their gradient (beside them if they are fp32); of two chunks in
    #: ``grad_in_forward`` over several ranks (``store`` with the scaled-exp GEMM works in the stored ones,
    #: ``skip_zero_upstream`` aside)
    chunk_logits: int = 0
    #: logits saved for the backward
    kept_logits: int = 0
    #: fp32 sum of ``grad_weight`` beside the wgrad accumulator
    grad_weight_sum: int = 0
    #: fp32 sum of ``grad_hidden``, where the backward goes by blocks of columns
    grad_hidden_sum: int = 0
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
    #: with ``skip_zero_upstream``: this rank's hidden states of the tokens that are left, at most all
    picked_hidden: int = 0
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


@dataclass(frozen=True)
class Plan:
    """The result of :func:`plan`."""

    #: store, grad_in_forward, recompute, or mixed
    strategy: str
    #: How to cut the tokens of each part.
    cut: Cut
    #: Number of leading chunks whose logits are stored: all in store, some in mixed, else 0.
    stored_chunks: int
    #: Tokens of the longest chunk over the tensor-parallel group.
    capacity: int
    #: Whether grad_weight is one GEMM over all tokens: its fp32 sum is written once, and the scaled hidden
    #: states of all tokens are held beside E.
    wgrad_at_once: bool
    #: ``recompute`` over one rank: columns of a block, where its backward takes all tokens and one block of
    #: the vocabulary at a time; 0: chunk by chunk.
    block_columns: int
    memory: Memory
    #: Predicted time of forward and backward over that of the three GEMMs into the same wgrad accumulator
    #: (two for a frozen weight). It ranks strategies, to a few percent on an H200 in bf16.
    relative_time: float
    #: The inputs of this plan; None for an option that was only considered.
    chosen_for: PlanInputs | None = field(default=None, compare=False, repr=False)

    @property
    def count(self) -> int:
        """Number of chunks."""
        return self.cut.count

    @property
    def saves_last_hidden(self) -> bool:
        """Whether the forward may leave the last chunk's gathered hidden states to the backward."""
        return self.chosen_for is None or not self.chosen_for.promise_broken

    @property
    def why(self) -> str:
        """The reason for this choice, one sentence for the log; empty for an option."""
        return "" if self.chosen_for is None else _why(self.chosen_for, self)

    @property
    def waits_for_host(self) -> bool:
        """Whether the device starves while the host looks at the promise of ``grad_in_forward``."""
        inputs = self.chosen_for
        return self.strategy == "grad_in_forward" and inputs is not None and inputs.shows_the_wait

    @property
    def predicted_peak_bytes(self) -> int:
        """Predicted peak bytes beside inputs, ``grad_hidden`` and the wgrad accumulator."""
        return self.memory.total

    @property
    def name(self) -> str:
        """The strategy, and whether its backward goes by columns."""
        return f"{self.strategy} by columns" if self.block_columns else self.strategy

    @property
    def chunks_in_words(self) -> str:
        words = f"{self.count} chunk{'' if self.count == 1 else 's'} of {self.capacity} tokens"
        if self.block_columns:
            return f"{words}, the backward in blocks of {self.block_columns} columns"
        return words + (f", the first {self.stored_chunks} stored" if self.strategy == "mixed" else "")


@lru_cache(maxsize=512)
def plan(inputs: PlanInputs) -> Plan:
    """The fastest plan that fits the budget, by predicted time and bytes.

    A strategy or chunks named by the user are taken as they are. Without a budget, ``auto`` may use what
    ``grad_in_forward`` would need with the user's chunks, or its own: short sequences then take ``store``,
    longer ones ``grad_in_forward`` if the token weights are known and the head is not too small for its wait,
    else ``mixed``. Chunks are as long as
    :meth:`PlanInputs.longest_chunk` says, and shorter only if the budget asks for it. If nothing fits, the
    smallest plan is returned, with its figure in :attr:`Plan.why`.

    Raises:
        OverBudget: the strategy was named by the user and fits the budget with no chunking.

    Source: docs/design.md and the constants above.
    """
    if inputs.promise_broken:
        return _after_a_broken_promise(inputs)
    if inputs.config.strategy != "auto":
        return _by_name(inputs)
    budget = budget_bytes(inputs)
    chosen = _fastest(inputs, budget) or min(
        _options(inputs, budget),
        key=lambda option: (option.predicted_peak_bytes, option.relative_time),
    )
    return replace(chosen, chosen_for=inputs)


def _after_a_broken_promise(inputs: PlanInputs) -> Plan:
    """``recompute`` in the place of ``grad_in_forward``, in the same chunks.

    It needs no more memory, and a checkpoint may run the forward of a plan of before by this one: both save
    the same tensors.
    """
    before = plan(replace(inputs, promise_broken=False))
    if before.strategy != "grad_in_forward":
        return before
    return replace(_option(inputs, "recompute", before.cut, 0), chosen_for=inputs)


def _fastest(inputs: PlanInputs, budget: int) -> Plan | None:
    """The fastest plan that fits, or None; considers as few as possible, since steps with dynamic batches
    wait for it."""
    pure = [
        _pure_options(inputs, strategy)
        for strategy in _pure_strategies(inputs)
        if strategy != "store" or _kept_bytes(inputs, inputs.num_tokens) <= budget
    ]
    fitting: list[Plan] = []
    for options in (*pure, _column_options(inputs)):
        # Longest chunks and widest blocks come first, and are no slower.
        fitting += islice((option for option in options if option.predicted_peak_bytes <= budget), 1)
    best = min(fitting, key=_rank, default=None)
    for cut in _cuts(inputs, "mixed", SHORTEST_FAST_CHUNK):
        if cut.count < 2:
            continue
        # A mixed plan stores at best all chunks except the last.
        bound = relative_time(inputs, "mixed", cut, cut.count - 1)
        if best is None or bound <= best.relative_time:
            mixed = _mixed_option(inputs, cut, budget)
            if mixed is not None:
                best = mixed if best is None else min(best, mixed, key=_rank)
    return best


def alternatives(inputs: PlanInputs) -> tuple[Plan, ...]:
    """The best plan of each strategy, whatever the user named: within the budget, else its smallest.

    Of ``recompute`` the best by chunks and the best by columns.
    """
    config = replace(inputs.config, strategy="auto")
    inputs = replace(inputs, config=config, token_weights_known=True)
    budget = budget_bytes(inputs)
    options = _options(inputs, budget)
    if inputs.shows_the_wait:
        options += _pure_options(inputs, "grad_in_forward")
    best = []
    for name in ("store", "grad_in_forward", "mixed", "recompute", "recompute by columns"):
        of_it = [option for option in options if option.name == name]
        fitting = [option for option in of_it if option.predicted_peak_bytes <= budget]
        if fitting:
            best.append(min(fitting, key=_rank))
        elif of_it:
            best.append(min(of_it, key=lambda option: option.predicted_peak_bytes))
    return tuple(best)


def peak_memory(
    inputs: PlanInputs,
    strategy: str,
    cut: Cut,
    stored_chunks: int,
    wgrad_at_once: bool = False,
    block_columns: int = 0,
) -> Memory:
    """Predicted peak of a strategy in these chunks, of which the first ``stored_chunks`` are stored.

    The larger of forward (with tile statistics) and backward (with scaled hidden states). The backward of
    ``grad_in_forward`` needs memory only where its gradients must be made again, less than its forward.
    """
    forward = forward_memory(inputs, strategy, cut, stored_chunks)
    if strategy == "grad_in_forward":
        backward = remade_memory(inputs, cut)
    elif block_columns:
        backward = columns_memory(inputs, block_columns)
    else:
        backward = backward_memory(inputs, cut, stored_chunks, wgrad_at_once)
        if inputs.config.skip_zero_upstream:
            shortened = backward_memory(inputs, cut, stored_chunks, picks=True)
            backward = max(backward, shortened, key=lambda memory: memory.total)
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
        kept_logits=_kept_bytes(inputs, _stored_tokens(inputs, cut, stored_chunks)),
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
    inputs: PlanInputs,
    cut: Cut,
    stored_chunks: int,
    wgrad_at_once: bool = False,
    keeps_last: bool = True,
    picks: bool = False,
) -> Memory:
    """The backward's peak of ``store``, ``recompute`` and ``mixed``, which run the last chunk first.

    Args:
        keeps_last: whether the forward left that chunk's gathered hidden states.
        picks: whether tokens without an upstream gradient are left out (:mod:`.zero_upstream`). Rows of a
            stored chunk are then copied, and nothing is read of the gathered hidden states that were left.
    """
    count, capacity = cut.count, inputs.num_parts * cut.longest
    chunk = _ChunkBytes.of(inputs, capacity)
    saves_e = inputs.saves_e
    again, frozen = stored_chunks < count, inputs.wgrad_accumulator == "none"
    num_logits = int(not saves_e or again or picks)
    # The chunk saved by the forward stays unchanged; beside it are the gathered ones and its scaled copy.
    waiting = _waiting(inputs, count, stored_chunks) if keeps_last else 0
    ring = count - stored_chunks if frozen else count
    if not picks and (frozen or again or not saves_e):
        ring -= waiting
    scales = stored_chunks or inputs.teacher_hidden_size
    gathered, scaled = min(ring, 2) * chunk.gathered, chunk.scaled if scales else 0
    if wgrad_at_once:
        # Hidden states of all tokens, scaled, beside E of all.
        every = inputs.itemsize * inputs.num_tokens * inputs.hidden_size
        gathered, scaled = (every, 0) if inputs.num_parts > 1 else (0, every)
    sums = _sums_grad_weight(inputs, min(count, 1) if wgrad_at_once else count)
    of_teacher = inputs.teacher_itemsize * inputs.teacher_hidden_size * inputs.uses_in_flight
    # Logits exist beside gradients of another dtype only if they are recomputed.
    logits = (num_logits if again or picks or not chunk.gradients else 0) * chunk.logits
    return Memory(
        chunk_logits=logits + chunk.gradients,
        kept_logits=_kept_bytes(inputs, _stored_tokens(inputs, cut, stored_chunks)),
        grad_weight_sum=_sum_bytes(inputs) if sums else 0,
        teacher=inputs.teacher_bytes * capacity if again else 0,
        teacher_copy=of_teacher * (inputs.num_tokens // inputs.num_parts) if again else 0,
        scaled_hidden=scaled,
        picked_hidden=_own_hidden_bytes(inputs) if picks else 0,
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


def columns_memory(inputs: PlanInputs, block_columns: int) -> Memory:
    """The peak of a backward by blocks of columns: of ``recompute`` over one rank."""
    of_block = replace(inputs, num_rows=block_columns)
    block = _ChunkBytes.of(of_block, inputs.num_tokens)
    sums = _sum_bytes(of_block) if _sums_grad_weight(inputs, 1) else 0  # cannot be added in place
    return Memory(
        chunk_logits=block.logits + block.gradients,
        grad_weight_sum=sums,
        grad_hidden_sum=4 * inputs.num_tokens * inputs.hidden_size,
        picked_hidden=_own_hidden_bytes(inputs) if inputs.config.skip_zero_upstream else 0,
        tile_statistics=block.marks,
        **_always(inputs, inputs.num_tokens, block, 0, 1),
    )


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


def _kept_bytes(inputs: PlanInputs, stored_tokens: int) -> int:
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


def relative_time(
    inputs: PlanInputs,
    strategy: str,
    cut: Cut,
    stored_chunks: int,
    wgrad_at_once: bool = False,
    block_columns: int = 0,
) -> float:
    """Predicted time over that of the step's bare GEMMs into the same wgrad accumulator.

    Counts GEMMs, the chunks' passes over ``grad_weight`` beyond the first (the blocks' over
    ``grad_hidden``), the last pass over an fp32 sum, and the row kernels. Overlap and collectives are not
    modelled.
    """
    tokens, stored_tokens = inputs.num_tokens, _stored_tokens(inputs, cut, stored_chunks)
    if tokens == 0:
        return 1.0
    frozen = inputs.wgrad_accumulator == "none"
    time = 1.0
    teacher = inputs.teacher_hidden_size / inputs.hidden_size
    if strategy in ("recompute", "mixed"):
        time += (1 + teacher) * (tokens - stored_tokens) / tokens / 3
    if teacher:
        # Both sides are read for their statistics and for the gradient, which is written.
        time += ROWS_HIDDEN_SIZE / inputs.hidden_size * 5 / 3
    elif inputs.logits_backend == "gemm_rows":
        moved = (2 * inputs.logits_itemsize + inputs.itemsize) / (3 * inputs.itemsize)
        time += ROWS_HIDDEN_SIZE / inputs.hidden_size * moved
    elif inputs.saves_logits:
        passes = 1.0 if strategy == "grad_in_forward" else stored_tokens / tokens
        time += ROWS_HIDDEN_SIZE / inputs.hidden_size * passes * 2 / 3  # read once and written
    if block_columns:
        columns = inputs.num_rows
        time += ACCUMULATION_TOKENS[inputs.logits_backend] * (-(-columns // block_columns) - 1) / columns
        time += SWEEP_TOKENS_PER_BYTE * (4 + inputs.itemsize) / columns
    if not frozen:
        num_gemms = min(cut.count, 1) if wgrad_at_once or block_columns else cut.count
        time += ACCUMULATION_TOKENS[inputs.logits_backend] * max(0, num_gemms - 1) / tokens
        if strategy == "grad_in_forward" or _sums_grad_weight(inputs, num_gemms):
            # Reads the sum; reads and writes a buffer, or writes what autograd gets.
            end_itemsize = 4 if inputs.wgrad_accumulator == "main_grad" else inputs.itemsize
            moved = 4 + (1 if inputs.wgrad_accumulator == "returned" else 2) * end_itemsize
            time += SWEEP_TOKENS_PER_BYTE * moved / tokens
    # All above is over three GEMMs; with a frozen weight there are two, with a teacher more.
    return 1 + (time - 1) * 3 / inputs.num_gemms


def _sums_grad_weight(inputs: PlanInputs, count: int) -> bool:
    """Whether the backward sums in an fp32 buffer before the wgrad accumulator: see ``wgrad.py``."""
    scaled = inputs.dtype == "float16"
    if inputs.wgrad_accumulator == "returned":
        # Without a chunk the sum is zeros.
        return inputs.dtype != "float32" and (count != 1 or scaled)
    return inputs.wgrad_accumulator == "low_main_grad" or (inputs.wgrad_accumulator == "main_grad" and scaled)


def _cuts(inputs: PlanInputs, strategy: str, shortest: int) -> Iterator[Cut]:
    """Ways to cut the tokens, longest chunks first: the user's, or from the longest downwards."""
    tokens_per_rank = -(-inputs.num_tokens // inputs.num_parts)
    if inputs.config.num_chunks is not None:
        yield Cut.into(tokens_per_rank, inputs.config.num_chunks)
        return
    if inputs.config.chunk_tokens is not None:
        yield Cut.of_length(tokens_per_rank, max(1, inputs.config.chunk_tokens // inputs.num_parts))
        return
    longest = inputs.longest_chunk(strategy)
    if (
        strategy != "grad_in_forward"
        and not _may_be_at_once(inputs, strategy)
        and not _sums_grad_weight(inputs, 1)
        and _sums_grad_weight(inputs, 2)
        and inputs.itemsize * (inputs.num_tokens - longest) <= 4 * inputs.hidden_size
    ):
        # A single chunk needs no fp32 sum of grad_weight, which saves more than the longer chunk costs.
        longest = max(longest, inputs.num_tokens)
    tile = TILE_TOKENS // math.gcd(TILE_TOKENS, inputs.num_parts)
    last_count = None
    for size in _sizes(longest, shortest):
        # Of about equal size, so that the last one is not tiny.
        count = max(1, -(-inputs.num_tokens // size))
        if count == last_count:
            continue
        last_count = count
        step = -(-tokens_per_rank // count)
        step = min(-(-step // tile) * tile, tokens_per_rank) or size
        yield Cut.of_length(tokens_per_rank, step)


def _sizes(longest: int, shortest: int) -> Iterator[int]:
    """``longest``, then smaller powers of two and three quarters of such, down to ``shortest``."""
    yield longest
    power = 2 ** (longest - 1).bit_length()
    while power > shortest:
        for size in (3 * power // 4, power // 2):
            if shortest <= size < longest:
                yield size
        power //= 2


def _stored_tokens(inputs: PlanInputs, cut: Cut, stored_chunks: int) -> int:
    return inputs.num_parts * cut.tokens_of(stored_chunks)


def _may_be_at_once(inputs: PlanInputs, strategy: str) -> bool:
    """Whether ``grad_weight`` may be one GEMM over all tokens: only if the scaled-exp GEMM's ``E`` of all
    chunks is saved.
    """
    return strategy == "store" and inputs.saves_e and inputs.wgrad_accumulator != "none"


def _option(
    inputs: PlanInputs,
    strategy: str,
    cut: Cut,
    stored_chunks: int,
    wgrad_at_once: bool = False,
    block_columns: int = 0,
) -> Plan:
    choice = inputs, strategy, cut, stored_chunks, wgrad_at_once, block_columns
    return Plan(
        strategy=strategy,
        cut=cut,
        stored_chunks=stored_chunks,
        capacity=inputs.num_parts * cut.longest,
        wgrad_at_once=wgrad_at_once,
        block_columns=block_columns,
        memory=peak_memory(*choice),
        relative_time=relative_time(*choice),
    )


def _pure_strategies(inputs: PlanInputs) -> tuple[str, ...]:
    """The strategies that ``auto`` may take, except ``mixed``."""
    if inputs.token_weights_known and not inputs.shows_the_wait:
        return "store", "grad_in_forward", "recompute"
    return "store", "recompute"


def _pure_options(inputs: PlanInputs, strategy: str, shortest: int | None = None) -> Iterator[Plan]:
    """Longest chunks first."""
    if shortest is None:
        shortest = SHORTEST_CHUNK if strategy == "recompute" else SHORTEST_FAST_CHUNK
    for cut in _cuts(inputs, strategy, shortest):
        stored_chunks = cut.count if strategy == "store" else 0
        if _may_be_at_once(inputs, strategy):
            yield _option(inputs, strategy, cut, stored_chunks, wgrad_at_once=True)
        yield _option(inputs, strategy, cut, stored_chunks)


def _column_options(inputs: PlanInputs) -> Iterator[Plan]:
    """``recompute`` with a backward by blocks of columns, widest first.

    None over several ranks, where the reduction of ``grad_hidden`` would have no GEMM to run under, and none
    with the row kernels, whose GEMM may give other bits in the backward than the forward's statistics are of.
    """
    tokens, columns = inputs.num_tokens, inputs.num_rows
    if inputs.logits_backend != "scaled_exp" or inputs.tp_size > 1:
        return
    if inputs.teacher_hidden_size or inputs.chunks_asked or not tokens or inputs.wgrad_accumulator == "none":
        return
    cut = Cut.of_length(tokens, inputs.longest_chunk("recompute"))
    height, width = GEMM_TILE
    across = -(-inputs.hidden_size // width)
    for rounds in range(max(1, across // 2), 0, -1):
        size = TILES_AT_ONCE * rounds // across * height
        if 0 < size < columns:
            yield _option(inputs, "recompute", cut, 0, block_columns=size)


def _mixed_option(inputs: PlanInputs, cut: Cut, budget: int) -> Plan | None:
    """The mixed plan that stores as many chunks as fit; None if not even one fits."""

    def peak(stored_chunks: int) -> int:
        return _option(inputs, "mixed", cut, stored_chunks).predicted_peak_bytes

    fitting = bisect_right(range(cut.count), budget, key=peak)
    return _option(inputs, "mixed", cut, fitting - 1) if fitting > 1 else None


def _options(inputs: PlanInputs, budget: int) -> list[Plan]:
    """All plans that ``auto`` may take; mixed ones only if they fit, with as many stored chunks as fit."""
    pure = [o for name in _pure_strategies(inputs) for o in _pure_options(inputs, name)]
    pure += _column_options(inputs)
    cuts = _cuts(inputs, "mixed", SHORTEST_FAST_CHUNK)
    mixed = [_mixed_option(inputs, cut, budget) for cut in cuts]
    return pure + [option for option in mixed if option is not None]


def _rank(option: Plan) -> tuple[float, int, int]:
    """Sort key: fastest first, then fewest chunks, then fewest bytes."""
    return option.relative_time, option.count, option.predicted_peak_bytes


def budget_bytes(inputs: PlanInputs) -> int:
    if inputs.config.memory_mb is not None:
        return inputs.config.memory_mb * MIB
    return next(_pure_options(inputs, "grad_in_forward")).predicted_peak_bytes


def _by_name(inputs: PlanInputs) -> Plan:
    options = _pure_options(inputs, inputs.config.strategy, SHORTEST_CHUNK)
    by_columns = _column_options(inputs) if inputs.config.strategy == "recompute" else iter(())
    if inputs.config.memory_mb is None:
        first = [option for option in (next(options), next(by_columns, None)) if option is not None]
        return replace(min(first, key=_rank), chosen_for=inputs)
    every = [*options, *by_columns]
    fitting = [o for o in every if o.predicted_peak_bytes <= inputs.config.memory_mb * MIB]
    if fitting:
        return replace(min(fitting, key=_rank), chosen_for=inputs)
    least = min(every, key=lambda option: option.predicted_peak_bytes)
    needed = -(-least.predicted_peak_bytes // MIB)
    shorter = ", ask for shorter chunks" if inputs.chunks_asked else ""
    raise OverBudget(
        f"strategy {inputs.config.strategy!r} in {least.chunks_in_words} needs {needed} MiB beside its "
        f"inputs and gradients, and the budget is {inputs.config.memory_mb} MiB: give memory_mb "
        f"(--fused-ce-memory-mb) {needed} or more{shorter}, or choose strategy 'auto'",
        least,
    )


def _why(inputs: PlanInputs, chosen: Plan) -> str:
    if inputs.promise_broken:
        return "the loss is not what grad_in_forward was promised"
    if inputs.config.strategy != "auto":
        budget_mb = inputs.config.memory_mb
        within = "" if budget_mb is None else f", within the budget of {budget_mb} MiB"
        waits = f"; {WAITS_IN_WORDS}" if chosen.waits_for_host else ""
        return f"asked for by name{within}{waits}"
    budget = budget_bytes(inputs)
    if chosen.predicted_peak_bytes > budget:
        return _why_nothing_fits(inputs, chosen)
    return _why_best(inputs, budget, _options(inputs, budget), chosen)


def _why_nothing_fits(inputs: PlanInputs, least: Plan) -> str:
    how = " with the chunks asked for" if inputs.chunks_asked else ""
    budget = "the default budget (what grad_in_forward needs)"
    if inputs.config.memory_mb is not None:
        budget = f"the budget of {inputs.config.memory_mb} MiB"
    needed = _size(inputs, least.predicted_peak_bytes)
    return f"{budget} cannot be met{how}; {least.strategy} needs the least, {needed}"


def _why_best(inputs: PlanInputs, budget: int, options: list[Plan], best: Plan) -> str:
    if inputs.config.memory_mb is not None:
        within = f"the budget of {inputs.config.memory_mb} MiB"
    else:
        within = f"the default budget of {size_in_words(budget)} (what grad_in_forward needs)"
    others = []
    for strategy in ("store", "grad_in_forward"):
        if strategy == best.strategy:
            continue
        needed = [option.predicted_peak_bytes for option in options if option.strategy == strategy]
        if not needed:
            known = inputs.token_weights_known
            others.append(WAITS_IN_WORDS if known else "grad_in_forward needs token weights")
        elif min(needed) <= budget:
            others.append(f"{strategy} is no faster")
        elif _size(inputs, min(needed)) == _size(inputs, budget):
            others.append(f"{strategy} needs slightly more")
        else:
            others.append(f"{strategy} needs {_size(inputs, min(needed))}")
    return f"the fastest within {within}; {', '.join(others)}"


def size_in_words(num_bytes: int) -> str:
    """A size for people: tenths of a GiB, whole MiB below one GiB, tenths below 10 MiB."""
    if num_bytes >= 1024 * MIB:
        return f"{num_bytes / 1024 / MIB:.1f} GiB"
    return f"{num_bytes / MIB:.{0 if num_bytes >= 10 * MIB else 1}f} MiB"


def _size(inputs: PlanInputs, num_bytes: int) -> str:
    """In whole MiB, as a budget names it, if a budget was given."""
    return size_in_words(num_bytes) if inputs.config.memory_mb is None else f"{-(-num_bytes // MIB)} MiB"
