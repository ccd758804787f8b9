"""Chooses strategy and chunks of a head: a pure function of shapes, dtype, device and budget.

The op, the Megatron adapter and ``python -m megatron_fused_ce plan-head`` call it. Bytes are predicted by
:mod:`.memory`, whose letters are used here; time mostly follows from the GEMMs of a step::

    store, grad_in_forward  3, with grad_in_forward one pass over grad_weight more
    recompute               4
    mixed                   3, and a 4th for the chunks that are not stored

Every chunk also reads and writes the fp32 ``grad_weight``. The constants below were measured on an H200 in
bf16 unless they name another GPU; the files that they name are in docs/benchmarks/results.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial

from megatron_fused_ce.config import FusedCEConfig
from megatron_fused_ce.planner.chunks import Cut
from megatron_fused_ce.planner.memory import (
    MIB,
    Memory,
    PlanInputs,
    memory_of,
    size_in_words,
    sums_grad_weight,
)

#: Tokens of a chunk on a Hopper GPU: the fastest of 2048 to 32768 for each strategy at T = 32768, H = 4096,
#: V = 128256 (store 1.007 of three GEMMs, grad_in_forward 1.016, recompute 0.998 of its four), and within the
#: spread of the fastest at H = 2048, V = 151936 (2026-11-21-h200-chunks.md, 2026-11-23-h100-sweep.md). Other
#: devices take 4096, except for ``store``: 1 to 3 % slower on an H200, with half of the memory.
FAST_CHUNK, UNMEASURED_CHUNK = 8192, 4096
#: A Hopper GPU has one of these words in its name.
HOPPER = frozenset({"Hopper", "H100", "H200", "GH200", "H800", "H20"})
#: Shortest chunks: those of 1024 tokens lose 13 to 20 % to the passes over grad_weight. ``recompute``, and a
#: strategy asked for by name, go on to 256 if nothing longer fits; GEMMs of fewer tokens are inefficient.
SHORTEST_FAST_CHUNK, SHORTEST_CHUNK = 1024, 256
#: Chunks that the planner chooses are whole tiles of the GEMMs.
TILE_TOKENS = 128
#: One more chunk takes as long as the three GEMMs of this many tokens, whatever V and H are: it reads and
#: writes grad_weight, 8 bytes an entry at 4.8 TB/s against 740 TFLOP/s
#: (2026-11-21-h200-sweep-chunks-tp1-main-grad.md); the scaled-exp GEMM's pipeline hides some of it.
ACCUMULATION_TOKENS = {"scaled_exp": 130, "gemm_rows": 205}
#: The same for one byte an entry of an elementwise pass: grad_in_forward's last pass moves 12 in 1.70 ms of
#: 155 (1.58 of 37 at T = 8192, 1.03 of 91 at H = 2048; 2026-11-21-h200-reach-llama3-8b.md).
SWEEP_TOKENS_PER_BYTE = 355 / 12
#: The row kernels read the logits twice and write them once, in (this / H) of the three GEMMs' time.
ROWS_HIDDEN_SIZE = 172
#: FLOP of a call from which ``auto`` takes ``grad_in_forward`` on a GPU. Its backward waits once for the
#: host, and the GPU has nothing to do until the host has launched what follows: 0.4 to 1 ms. Times of it and
#: of ``store`` over that of three GEMMs (H100, H = 1024, V = 32064): 7.4 and 5.5 at T = 512, 3.4 and 2.3 at
#: 2048, 1.4 and 1.0 at 8192 (1.6 TFLOP), 1.28 and 1.05 at 16384 (3.2 TFLOP; ``recompute`` 1.43).
SMALLEST_FLOP_TO_WAIT = 3e12
WAITS_IN_WORDS = "grad_in_forward waits for the host in each backward, which a head this small shows"


#: Bytes of one copy of the logits up to which ``auto`` takes ``store`` where a caller gave neither token
#: weights nor a budget.
STORED_BY_DEFAULT = 4 << 30


@dataclass(frozen=True)
class Plan:
    """How to run a head: a cut of its tokens, and ``stored_chunks``, ``in_forward`` and ``wgrad_at_once``."""

    inputs: PlanInputs = field(compare=False, repr=False)
    strategy: str  # store, grad_in_forward, recompute, or mixed: a name for the planner and the log
    cut: Cut
    #: number of leading chunks whose logits are stored: all in store, some in mixed, else 0
    stored_chunks: int = 0
    #: whether one GEMM over all tokens makes grad_weight, of the stored E and the scaled hidden states of all
    wgrad_at_once: bool = False

    @property
    def in_forward(self) -> bool:
        """Whether the forward makes the gradients."""
        return self.strategy == "grad_in_forward"

    @property
    def remakes(self) -> bool:
        """Whether the backward computes the logits of some chunks again."""
        return self.stored_chunks < self.count

    @property
    def count(self) -> int:
        """Number of chunks."""
        return self.cut.count

    @property
    def capacity(self) -> int:
        """Tokens of the longest chunk over the tensor-parallel group."""
        return self.inputs.num_parts * self.cut.longest

    @property
    def waits_for_host(self) -> bool:
        """Whether the device idles while the host looks at the promise of ``grad_in_forward``."""
        return self.in_forward and shows_the_wait(self.inputs)

    @property
    def chunks_in_words(self) -> str:
        words = f"{self.count} chunk{'' if self.count == 1 else 's'} of {self.capacity} tokens"
        return words + (f", the first {self.stored_chunks} stored" if self.strategy == "mixed" else "")

    @property
    def predicted_peak_bytes(self) -> int:
        """Predicted peak beside inputs, ``grad_hidden`` and the wgrad accumulator."""
        return self.memory.total

    @cached_property
    def memory(self) -> Memory:
        """The peak by its terms: of the forward or of the backward, whichever is larger."""
        facts = self.inputs, self.cut, self.stored_chunks, self.in_forward, self.wgrad_at_once
        passes = (memory_of(*facts, backward=backward) for backward in (False, True))
        return max(passes, key=lambda memory: memory.total)

    @cached_property
    def relative_time(self) -> float:
        """Predicted time over that of the step's bare GEMMs into the same wgrad accumulator.

        Counts GEMMs, the chunks' passes over ``grad_weight`` beyond the first, the last pass over an fp32
        sum, and the row kernels; neither overlap nor collectives. It ranks strategies, to a few percent.
        """
        inputs, tokens = self.inputs, self.inputs.num_tokens
        if tokens == 0:
            return 1.0
        stored = inputs.num_parts * self.cut.tokens_of(self.stored_chunks) / tokens
        second = inputs.second_hidden_size / inputs.hidden_size
        more, passes = 0.0, 0.0  # time beyond three GEMMs, over theirs; passes over the logits
        if self.strategy in ("recompute", "mixed"):
            more += (1 + second) * (1 - stored) / 3
        if second:
            passes = 5 / 3  # both products are read for statistics and for the gradient, which is written
        elif inputs.logits_backend == "gemm_rows":
            passes = (2 * inputs.stored_itemsize + inputs.itemsize) / (3 * inputs.itemsize)
        elif inputs.saves_logits:
            passes = (1 if self.in_forward else stored) * 2 / 3  # read once and written
        more += ROWS_HIDDEN_SIZE / inputs.hidden_size * passes
        if inputs.trained:
            sums = min(self.count, 1) if self.wgrad_at_once else self.count
            more += ACCUMULATION_TOKENS[inputs.logits_backend] * max(0, sums - 1) / tokens
            if self.in_forward or sums_grad_weight(inputs, sums):
                # Reads the sum; reads and writes a buffer, or writes what autograd gets.
                end_itemsize = 4 if inputs.wgrad_accumulator == "main_grad" else inputs.itemsize
                moved = 4 + (1 if inputs.wgrad_accumulator == "returned" else 2) * end_itemsize
                more += SWEEP_TOKENS_PER_BYTE * moved / tokens
        return 1 + more * 3 / inputs.num_gemms

    @property
    def why(self) -> str:
        """The reason for this choice: one sentence for the log."""
        inputs, config, memory_mb = self.inputs, self.inputs.config, self.inputs.config.memory_mb
        if inputs.promise_broken:
            return "the loss is not what grad_in_forward was promised"
        if config.strategy != "auto":
            within = f", within the budget of {memory_mb} MiB" if memory_mb else ""
            return f"asked for by name{within}" + (f"; {WAITS_IN_WORDS}" if self.waits_for_host else "")

        def size(num_bytes: int) -> str:
            """In whole MiB, as a budget names it, if a budget was given."""
            return f"{-(-num_bytes // MIB)} MiB" if memory_mb else size_in_words(num_bytes)

        budget = budget_bytes(inputs)
        fits = self.predicted_peak_bytes <= budget
        limit = f"default budget{f' of {size(budget)}' if fits else ''} (what {_sets_budget(inputs)} needs)"
        if memory_mb:
            limit = f"budget of {memory_mb} MiB"
        if not fits:
            how = " with the chunks asked for" if config.num_chunks or config.chunk_tokens else ""
            least = f"{self.strategy} needs the least, {size(self.predicted_peak_bytes)}"
            return f"the {limit} cannot be met{how}; {least}"
        others = []
        for strategy in [name for name in ("store", "grad_in_forward") if name != self.strategy]:
            needed = _best(_options(inputs, strategy), budget).predicted_peak_bytes
            if strategy not in _strategies(inputs):
                known = inputs.token_weights_known
                others.append(WAITS_IN_WORDS if known else "grad_in_forward needs token weights")
            elif needed <= budget:
                others.append(f"{strategy} is no faster")
            else:
                alike = size(needed) == size(budget)
                others.append(f"{strategy} needs {'slightly more' if alike else size(needed)}")
        return f"the fastest within the {limit}; {', '.join(others)}"


class OverBudget(ValueError):
    """A strategy named by the user needs more than the budget, however short its chunks."""

    def __init__(self, message: str, least: Plan) -> None:
        super().__init__(message)
        self.least = least  #: the plan that needs the least


def in_forward(config: FusedCEConfig, dtype: str, bound: float | None) -> tuple[FusedCEConfig, bool]:
    """The config of a plan, and whether gradients may be made in the forward: in fp16 with a ``bound`` of the
    loss alone (:attr:`.Term.bound`)."""
    may = dtype != "float16" or (bound is not None and bound <= 1 + 1e-6)
    by_name = config.strategy == "grad_in_forward" and not may
    return replace(config, strategy="auto") if by_name else config, may


@lru_cache(maxsize=512)
def plan(inputs: PlanInputs) -> Plan:
    """The fastest plan that fits the budget, by predicted time and bytes.

    A strategy or chunks named by the user are taken as they are. Without a budget, ``auto`` may use what
    ``grad_in_forward`` (or ``store``, where that is the default) would need with the user's chunks, or its
    own: short sequences then take ``store``, longer ones ``grad_in_forward`` if the token weights are known
    and the head is not too small for its wait, else ``mixed``. Chunks are as long as :func:`longest_chunk`
    says, and shorter only if the budget asks for it. If nothing fits, ``auto`` takes the smallest plan, and a
    named strategy raises :class:`OverBudget`.

    Source: docs/design.md and the constants above.
    """
    if inputs.promise_broken:
        before = plan(replace(inputs, promise_broken=False))
        # In the same chunks recompute needs no more memory. Both save the same tensors, so a checkpoint may
        # run the forward again by this plan that ran by the other before.
        return Plan(inputs, "recompute", before.cut) if before.in_forward else before
    config, memory_mb = inputs.config, inputs.config.memory_mb
    if config.strategy == "auto":
        budget, names = budget_bytes(inputs), _strategies(inputs)
        # Steps with dynamic batches wait for this: no peak of store is predicted in vain.
        may_fit = names if _stored_bytes(inputs) <= budget else names[1:]
        fitting = [_best(_options(inputs, name), budget) for name in may_fit]
        fitting = [option for option in fitting if option.predicted_peak_bytes <= budget]
        fitting += _mixed(inputs, budget, min((option.relative_time for option in fitting), default=math.inf))
        every = (option for name in names for option in _options(inputs, name))
        return min(fitting, key=_rank) if fitting else _best(every, budget)
    chosen = _best(_options(inputs, config.strategy), memory_mb * MIB if memory_mb else math.inf)
    needed = -(-chosen.predicted_peak_bytes // MIB)
    if memory_mb and needed > memory_mb:
        shorter = ", ask for shorter chunks" if config.num_chunks or config.chunk_tokens else ""
        raise OverBudget(
            f"strategy {config.strategy!r} in {chosen.chunks_in_words} needs {needed} MiB beside its inputs "
            f"and gradients, and the budget is {memory_mb} MiB: give memory_mb (--fused-ce-memory-mb) "
            f"{needed} or more{shorter}, or choose strategy 'auto'",
            chosen,
        )
    return chosen


def alternatives(inputs: PlanInputs) -> tuple[Plan, ...]:
    """The best plan of each strategy, whatever the user named: within the budget, else its smallest."""
    inputs = replace(inputs, config=replace(inputs.config, strategy="auto"), token_weights_known=True)
    budget = budget_bytes(inputs)
    store, grad_in_forward, recompute = (
        _best(_options(inputs, strategy), budget) for strategy in ("store", "grad_in_forward", "recompute")
    )
    mixed = sorted(_mixed(inputs, budget), key=_rank)[:1]  # if any fits
    return store, grad_in_forward, *mixed, recompute


def budget_bytes(inputs: PlanInputs) -> int:
    """The user's budget, else what a strategy needs in its longest chunks."""
    if inputs.config.memory_mb is not None:
        return inputs.config.memory_mb * MIB
    return next(_options(inputs, _sets_budget(inputs))).predicted_peak_bytes


def _sets_budget(inputs: PlanInputs) -> str:
    stores = inputs.may_store and _stored_bytes(inputs) <= STORED_BY_DEFAULT
    return "store" if stores else "grad_in_forward"


def _stored_bytes(inputs: PlanInputs) -> int:
    return inputs.uses_in_flight * inputs.stored_itemsize * inputs.num_rows * inputs.num_tokens


def shows_the_wait(inputs: PlanInputs) -> bool:
    """Whether the GEMMs are too short to hide the wait of ``grad_in_forward``."""
    flop = 2 * inputs.num_gemms * inputs.num_tokens * inputs.hidden_size * inputs.num_rows
    return inputs.device != "cpu" and flop < SMALLEST_FLOP_TO_WAIT


def longest_chunk(inputs: PlanInputs, strategy: str) -> int:
    """Tokens of a chunk, if memory does not ask for fewer."""
    fast = strategy == "store" or not HOPPER.isdisjoint(inputs.device.split())
    return FAST_CHUNK if fast else UNMEASURED_CHUNK


def _strategies(inputs: PlanInputs) -> tuple[str, ...]:
    """The strategies that ``auto`` may take, except ``mixed``."""
    if inputs.token_weights_known and not shows_the_wait(inputs):
        return "store", "grad_in_forward", "recompute"
    return "store", "recompute"


def _cuts(inputs: PlanInputs, strategy: str) -> list[Cut]:
    """Ways to cut the tokens: the user's, or from the longest chunks downwards."""
    config, tokens, parts = inputs.config, inputs.num_tokens, inputs.num_parts
    tokens_per_rank = -(-tokens // parts)
    if config.num_chunks:
        return [Cut.into(tokens_per_rank, config.num_chunks)]
    if config.chunk_tokens:
        return [Cut.of_length(tokens_per_rank, max(1, config.chunk_tokens // parts))]
    longest = longest_chunk(inputs, strategy)
    if (
        strategy != "grad_in_forward"
        and not (strategy == "store" and inputs.scales_hidden)
        and sums_grad_weight(inputs, 2) > sums_grad_weight(inputs, 1)
        and inputs.itemsize * (tokens - longest) <= 4 * inputs.hidden_size
    ):
        # A single chunk needs no fp32 sum of grad_weight, which saves more than the longer chunk costs.
        longest = max(longest, tokens)
    shortest = SHORTEST_CHUNK if strategy in ("recompute", config.strategy) else SHORTEST_FAST_CHUNK
    # Powers of two, and three quarters of them.
    powers = range(longest.bit_length(), 0, -1)
    sizes = [size for power in powers for size in (3 << power, 2 << power) if shortest <= size < longest]
    # Chunks of about equal size, so that the last one is not tiny, and of whole tiles.
    counts = dict.fromkeys(max(1, -(-tokens // size)) for size in (longest, *sizes))
    tile = TILE_TOKENS // math.gcd(TILE_TOKENS, parts)
    steps = (-(-tokens_per_rank // (count * tile)) * tile for count in counts)
    return [Cut.of_length(tokens_per_rank, min(step, tokens_per_rank) or longest) for step in steps]


def _options(inputs: PlanInputs, strategy: str) -> Iterator[Plan]:
    """All plans of a strategy except ``mixed``. An earlier one is never slower than a later one."""
    # One GEMM may make grad_weight if all E is stored.
    for at_once in (True, False) if strategy == "store" and inputs.scales_hidden else (False,):
        for cut in _cuts(inputs, strategy):
            yield Plan(inputs, strategy, cut, cut.count if strategy == "store" else 0, at_once)


def _mixed(inputs: PlanInputs, budget: int, time: float = math.inf) -> Iterator[Plan]:
    """The ``mixed`` plans that fit and may be as fast as ``time``, each with as many stored chunks as fit."""
    for cut in _cuts(inputs, "mixed"):
        storing = partial(Plan, inputs, "mixed", cut)
        if cut.count > 1 and storing(cut.count - 1).relative_time <= time:
            counts = range(1, cut.count)
            fitting = bisect_right(counts, budget, key=lambda count: storing(count).predicted_peak_bytes)
            if fitting:
                yield storing(fitting)


def _best(options: Iterable[Plan], budget: float) -> Plan:
    """The first that fits the budget, else the smallest."""
    others = []
    for option in options:
        if option.predicted_peak_bytes <= budget:
            return option
        others.append(option)
    return min(others, key=lambda option: (option.predicted_peak_bytes, option.relative_time))


def _rank(option: Plan) -> tuple[float, int, int]:
    """Sort key: fastest first, then fewest chunks, then fewest bytes."""
    return option.relative_time, option.count, option.predicted_peak_bytes
