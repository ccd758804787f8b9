"""Which strategy, and how many tokens a chunk: a pure function of shapes, dtype, device and budget.

Needs neither torch nor a device, so the op, the Megatron adapter and the command line use the same function
(``python -m megatron_fused_ce plan-head``). Bytes are :mod:`.head_bytes`'s, and so are the letters. GEMMs::

    store, grad_in_forward  3, of grad_in_forward one pass over grad_weight more
    recompute               4
    mixed                   3, and the chunks that are not stored take a 4th

Every chunk also reads and writes the fp32 ``grad_weight``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice

from megatron_fused_ce.planner.chunks import Cut
from megatron_fused_ce.planner.memory import (
    MIB,
    Memory,
    PlanInputs,
    kept_bytes,
    peak_memory,
    size_in_words,
    stored_tokens_of,
    sums_grad_weight,
)

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


def _num_gemms(inputs: PlanInputs) -> float:
    """GEMMs of a step, each as long as the student's logits take."""
    teacher = inputs.teacher_hidden_size / inputs.hidden_size
    return (2 if inputs.wgrad_accumulator == "none" else 3) + teacher


def shows_the_wait(inputs: PlanInputs) -> bool:
    """Whether the GEMMs are too short to hide the wait of ``grad_in_forward``."""
    flop = 2 * _num_gemms(inputs) * inputs.num_tokens * inputs.hidden_size * inputs.num_rows
    return inputs.device != "cpu" and flop < SMALLEST_FLOP_TO_WAIT


def longest_chunk(inputs: PlanInputs, strategy: str) -> int:
    """Tokens of a chunk, if memory does not ask for fewer."""
    if strategy == "store" or not HOPPER.isdisjoint(inputs.device.split()):
        return FAST_CHUNK
    return UNMEASURED_CHUNK


def _chunks_asked(inputs: PlanInputs) -> bool:
    return inputs.config.num_chunks is not None or inputs.config.chunk_tokens is not None


class OverBudget(ValueError):
    """A strategy named by the user needs more than the budget, however short its chunks."""

    #: the plan that needs the least
    least: Plan

    def __init__(self, message: str, least: Plan) -> None:
        super().__init__(message)
        self.least = least


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
    def in_forward(self) -> bool:
        """Whether gradients are made in the forward."""
        return self.strategy == "grad_in_forward"

    @property
    def remakes(self) -> bool:
        """Whether the backward makes logits of some chunk again, from labels and statistics."""
        return self.stored_chunks < self.count

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
        return self.strategy == "grad_in_forward" and inputs is not None and shows_the_wait(inputs)

    @property
    def predicted_peak_bytes(self) -> int:
        """Predicted peak bytes beside inputs, ``grad_hidden`` and the wgrad accumulator."""
        return self.memory.total

    @property
    def chunks_in_words(self) -> str:
        words = f"{self.count} chunk{'' if self.count == 1 else 's'} of {self.capacity} tokens"
        return words + (f", the first {self.stored_chunks} stored" if self.strategy == "mixed" else "")


@lru_cache(maxsize=512)
def plan(inputs: PlanInputs) -> Plan:
    """The fastest plan that fits the budget, by predicted time and bytes.

    A strategy or chunks named by the user are taken as they are. Without a budget, ``auto`` may use what
    ``grad_in_forward`` would need with the user's chunks, or its own: short sequences then take ``store``,
    longer ones ``grad_in_forward`` if the token weights are known and the head is not too small for its wait,
    else ``mixed``. Chunks are as long as
    :func:`longest_chunk` says, and shorter only if the budget asks for it. If nothing fits, the
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
        _options(inputs, budget), key=lambda option: (option.predicted_peak_bytes, option.relative_time)
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
        if strategy != "store" or kept_bytes(inputs, inputs.num_tokens) <= budget
    ]
    fitting: list[Plan] = []
    for options in pure:
        # Longest chunks come first, and are no slower; but grad_weight at once may fit with shorter ones
        # alone, and is no slower either.
        within = (option for option in options if option.predicted_peak_bytes <= budget)
        fitting += islice(within, 1)
        if fitting and _may_be_at_once(inputs, fitting[-1].strategy) and not fitting[-1].wgrad_at_once:
            fitting += islice((option for option in within if option.wgrad_at_once), 1)
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
    """The best plan of each strategy, whatever the user named: within the budget, else its smallest."""
    config = replace(inputs.config, strategy="auto")
    inputs = replace(inputs, config=config, token_weights_known=True)
    budget = budget_bytes(inputs)
    options = _options(inputs, budget)
    if shows_the_wait(inputs):
        options += _pure_options(inputs, "grad_in_forward")
    best = []
    for name in ("store", "grad_in_forward", "mixed", "recompute"):
        of_it = [option for option in options if option.strategy == name]
        fitting = [option for option in of_it if option.predicted_peak_bytes <= budget]
        if fitting:
            best.append(min(fitting, key=_rank))
        elif of_it:
            best.append(min(of_it, key=lambda option: option.predicted_peak_bytes))
    return tuple(best)


def relative_time(
    inputs: PlanInputs, strategy: str, cut: Cut, stored_chunks: int, wgrad_at_once: bool = False
) -> float:
    """Predicted time over that of the step's bare GEMMs into the same wgrad accumulator.

    Counts GEMMs, the chunks' passes over ``grad_weight`` beyond the first, the last pass over an fp32 sum,
    and the row kernels. Overlap and collectives are not modelled.
    """
    tokens, stored_tokens = inputs.num_tokens, stored_tokens_of(inputs, cut, stored_chunks)
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
    if not frozen:
        num_gemms = min(cut.count, 1) if wgrad_at_once else cut.count
        time += ACCUMULATION_TOKENS[inputs.logits_backend] * max(0, num_gemms - 1) / tokens
        if strategy == "grad_in_forward" or sums_grad_weight(inputs, num_gemms):
            # Reads the sum; reads and writes a buffer, or writes what autograd gets.
            end_itemsize = 4 if inputs.wgrad_accumulator == "main_grad" else inputs.itemsize
            moved = 4 + (1 if inputs.wgrad_accumulator == "returned" else 2) * end_itemsize
            time += SWEEP_TOKENS_PER_BYTE * moved / tokens
    # All above is over three GEMMs; with a frozen weight there are two, with a teacher more.
    return 1 + (time - 1) * 3 / _num_gemms(inputs)


def _cuts(inputs: PlanInputs, strategy: str, shortest: int) -> Iterator[Cut]:
    """Ways to cut the tokens, longest chunks first: the user's, or from the longest downwards."""
    tokens_per_rank = -(-inputs.num_tokens // inputs.num_parts)
    if inputs.config.num_chunks is not None:
        yield Cut.into(tokens_per_rank, inputs.config.num_chunks)
        return
    if inputs.config.chunk_tokens is not None:
        yield Cut.of_length(tokens_per_rank, max(1, inputs.config.chunk_tokens // inputs.num_parts))
        return
    longest = longest_chunk(inputs, strategy)
    if (
        strategy != "grad_in_forward"
        and not _may_be_at_once(inputs, strategy)
        and not sums_grad_weight(inputs, 1)
        and sums_grad_weight(inputs, 2)
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


def _may_be_at_once(inputs: PlanInputs, strategy: str) -> bool:
    """Whether ``grad_weight`` may be one GEMM over all tokens: only if the scaled-exp GEMM's ``E`` of all
    chunks is saved.
    """
    return strategy == "store" and inputs.saves_e and inputs.wgrad_accumulator != "none"


def _option(
    inputs: PlanInputs, strategy: str, cut: Cut, stored_chunks: int, wgrad_at_once: bool = False
) -> Plan:
    choice = inputs, strategy, cut, stored_chunks, wgrad_at_once
    return Plan(
        strategy=strategy,
        cut=cut,
        stored_chunks=stored_chunks,
        capacity=inputs.num_parts * cut.longest,
        wgrad_at_once=wgrad_at_once,
        memory=peak_memory(*choice),
        relative_time=relative_time(*choice),
    )


def _pure_strategies(inputs: PlanInputs) -> tuple[str, ...]:
    """The strategies that ``auto`` may take, except ``mixed``."""
    if inputs.token_weights_known and not shows_the_wait(inputs):
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


def _mixed_option(inputs: PlanInputs, cut: Cut, budget: int) -> Plan | None:
    """The mixed plan that stores as many chunks as fit; None if not even one fits."""

    def peak(stored_chunks: int) -> int:
        return _option(inputs, "mixed", cut, stored_chunks).predicted_peak_bytes

    fitting = bisect_right(range(cut.count), budget, key=peak)
    return _option(inputs, "mixed", cut, fitting - 1) if fitting > 1 else None


def _options(inputs: PlanInputs, budget: int) -> list[Plan]:
    """All plans that ``auto`` may take; mixed ones only if they fit, with as many stored chunks as fit."""
    pure = [o for name in _pure_strategies(inputs) for o in _pure_options(inputs, name)]
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
    if inputs.config.memory_mb is None:
        return replace(next(options), chosen_for=inputs)
    every = list(options)
    fitting = [o for o in every if o.predicted_peak_bytes <= inputs.config.memory_mb * MIB]
    if fitting:
        return replace(min(fitting, key=_rank), chosen_for=inputs)
    least = min(every, key=lambda option: option.predicted_peak_bytes)
    needed = -(-least.predicted_peak_bytes // MIB)
    shorter = ", ask for shorter chunks" if _chunks_asked(inputs) else ""
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
    how = " with the chunks asked for" if _chunks_asked(inputs) else ""
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


def _size(inputs: PlanInputs, num_bytes: int) -> str:
    """In whole MiB, as a budget names it, if a budget was given."""
    return size_in_words(num_bytes) if inputs.config.memory_mb is None else f"{-(-num_bytes // MIB)} MiB"
