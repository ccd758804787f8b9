"""Chooses strategy and chunks of a head: a pure function of shapes, dtype, device and budget.

Needs neither torch nor a device: the op, the Megatron adapter and ``python -m megatron_fused_ce plan-head``
call the same function. Bytes and letters are those of :mod:`.memory`. GEMMs of a step::

    store, grad_in_forward  3, of grad_in_forward one pass over grad_weight more
    recompute               4
    mixed                   3, and the chunks that are not stored take a 4th

Every chunk also reads and writes the fp32 ``grad_weight``. Constants were measured in bf16 on an H200 where
they say no other; their files are in docs/benchmarks/results.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from megatron_fused_ce.planner.chunks import Cut
from megatron_fused_ce.planner.memory import (
    MIB,
    Memory,
    PlanInputs,
    backward_memory,
    forward_memory,
    size_in_words,
    sums_grad_weight,
)

#: Tokens of a chunk, on the GPUs of whose names HOPPER has a word: of 2048 to 32768 the fastest for each
#: strategy at T = 32768, H = 4096, V = 128256 (store 1.007 of three GEMMs, grad_in_forward 1.016, recompute
#: 0.998 of its four), and as fast as others at H = 2048, V = 151936. 2026-11-21-h200-chunks.md,
#: 2026-11-23-h100-sweep.md. Elsewhere, but for ``store``: 4096 lose 1 to 3 % there, with half of the memory.
FAST_CHUNK, UNMEASURED_CHUNK = 8192, 4096
HOPPER = frozenset({"Hopper", "H100", "H200", "GH200", "H800", "H20"})
#: Shortest chunk that is not chosen for memory: 1024 tokens lose 13 to 20 % to the passes over grad_weight.
#: And of ``recompute``, if nothing longer fits; the GEMMs of shorter ones are inefficient.
SHORTEST_FAST_CHUNK, SHORTEST_CHUNK = 1024, 256
#: Chunks that the planner chooses are whole tiles of the GEMMs.
TILE_TOKENS = 128
#: One more chunk takes as long as the three GEMMs of this many tokens, whatever V and H are: 8 bytes of each
#: entry of grad_weight at 4.8 TB/s against 740 TFLOP/s (2026-11-21-h200-sweep-chunks-tp1-main-grad.md). The
#: scaled-exp GEMM's pipeline hides some of it (2026-11-21-h200-chunks.md).
ACCUMULATION_TOKENS = {"scaled_exp": 130, "gemm_rows": 205}
#: The same for one byte an entry of an elementwise pass: grad_in_forward's last pass moves 12 in 1.70 ms of
#: 155 (1.58 of 37 at T = 8192, 1.03 of 91 at H = 2048; 2026-11-21-h200-reach-llama3-8b.md).
SWEEP_TOKENS_PER_BYTE = 355 / 12
#: The row kernels read the logits twice and write them once, in (this / H) of the three GEMMs' time: 4.3 TB/s.
ROWS_HIDDEN_SIZE = 172
#: ``auto`` takes no ``grad_in_forward`` for a GPU's head of fewer FLOP a call: its backward waits once for the
#: host, and the GPU idles for 0.4 to 1 ms until the host has launched what follows. Times over three GEMMs, of
#: it and of ``store`` (H100, H = 1024, V = 32064): 7.4 and 5.5 at T = 512, 3.4 and 2.3 at 2048, 1.4 and 1.0 at
#: 8192 (1.6 TFLOP), 1.28 and 1.05 at 16384 (3.2 TFLOP; ``recompute`` 1.43).
SMALLEST_FLOP_TO_WAIT = 3e12
WAITS_IN_WORDS = "grad_in_forward waits for the host in each backward, which a head this small shows"


@dataclass(frozen=True)
class Plan:
    """How to run a head: the cut of its tokens and three facts, ``stored_chunks``, ``in_forward`` and
    ``wgrad_at_once``. The strategy's name is for the planner and the log."""

    inputs: PlanInputs = field(compare=False, repr=False)
    strategy: str  # store, grad_in_forward, recompute, or mixed
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
    def saves_last_hidden(self) -> bool:
        """Whether the forward may leave the last chunk's gathered hidden states to the backward."""
        return not self.inputs.promise_broken

    @property
    def waits_for_host(self) -> bool:
        """Whether the device idles while the host looks at the promise of ``grad_in_forward``."""
        return self.in_forward and shows_the_wait(self.inputs)

    @property
    def why(self) -> str:
        """The reason for this choice, one sentence for the log."""
        return _why(self.inputs, self)

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
        what = self.inputs, self.cut, self.stored_chunks
        backward = backward_memory(*what, self.wgrad_at_once, remade=self.in_forward)
        return max(forward_memory(*what, self.in_forward), backward, key=lambda memory: memory.total)

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
        second, passes, more = inputs.second_hidden_size / inputs.hidden_size, 0.0, 0.0
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
        return 1 + more * 3 / _num_gemms(inputs)  # more: in units of three GEMMs


class OverBudget(ValueError):
    """A strategy named by the user needs more than the budget, however short its chunks."""

    def __init__(self, message: str, least: Plan) -> None:
        super().__init__(message)
        self.least = least  #: the plan that needs the least


@lru_cache(maxsize=512)
def plan(inputs: PlanInputs) -> Plan:
    """The fastest plan that fits the budget, by predicted time and bytes.

    A strategy or chunks named by the user are taken as they are. Without a budget, ``auto`` may use what
    ``grad_in_forward`` would need with the user's chunks, or its own: short sequences then take ``store``,
    longer ones ``grad_in_forward`` if the token weights are known and the head is not too small for its wait,
    else ``mixed``. Chunks are as long as :func:`longest_chunk` says, and shorter only if the budget asks for
    it. If nothing fits, the smallest plan is returned, with its figure in :attr:`Plan.why`.

    Raises:
        OverBudget: the strategy was named by the user and fits the budget with no chunking.

    Source: docs/design.md and the constants above.
    """
    if inputs.promise_broken:
        before = plan(replace(inputs, promise_broken=False))
        # recompute in the same chunks needs no more memory; and both save the same tensors, so that a
        # checkpoint may run the forward of a plan of before by this one.
        return Plan(inputs, "recompute", before.cut) if before.in_forward else before
    strategy, memory_mb = inputs.config.strategy, inputs.config.memory_mb
    if strategy == "auto":
        return _fastest(inputs, budget_bytes(inputs))
    chosen = _best(_options(inputs, strategy, SHORTEST_CHUNK), memory_mb * MIB if memory_mb else math.inf)
    needed = -(-chosen.predicted_peak_bytes // MIB)
    if memory_mb and needed > memory_mb:
        shorter = ", ask for shorter chunks" if _asks_for_chunks(inputs) else ""
        raise OverBudget(
            f"strategy {strategy!r} in {chosen.chunks_in_words} needs {needed} MiB beside its inputs and "
            f"gradients, and the budget is {memory_mb} MiB: give memory_mb (--fused-ce-memory-mb) {needed} "
            f"or more{shorter}, or choose strategy 'auto'",
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
    """The user's budget, else what ``grad_in_forward`` needs in its longest chunks."""
    if inputs.config.memory_mb is not None:
        return inputs.config.memory_mb * MIB
    return next(_options(inputs, "grad_in_forward")).predicted_peak_bytes


def shows_the_wait(inputs: PlanInputs) -> bool:
    """Whether the GEMMs are too short to hide the wait of ``grad_in_forward``."""
    flop = 2 * _num_gemms(inputs) * inputs.num_tokens * inputs.hidden_size * inputs.num_rows
    return inputs.device != "cpu" and flop < SMALLEST_FLOP_TO_WAIT


def _num_gemms(inputs: PlanInputs) -> float:
    """GEMMs of a step, each as long as the head's logits take."""
    return 2 + inputs.trained + inputs.second_hidden_size / inputs.hidden_size


def longest_chunk(inputs: PlanInputs, strategy: str) -> int:
    """Tokens of a chunk, if memory does not ask for fewer."""
    fast = strategy == "store" or not HOPPER.isdisjoint(inputs.device.split())
    return FAST_CHUNK if fast else UNMEASURED_CHUNK


def _strategies(inputs: PlanInputs) -> tuple[str, ...]:
    """The strategies that ``auto`` may take, except ``mixed``."""
    if inputs.token_weights_known and not shows_the_wait(inputs):
        return "store", "grad_in_forward", "recompute"
    return "store", "recompute"


def _may_be_at_once(inputs: PlanInputs, strategy: str) -> bool:
    """Whether one GEMM over all tokens may make ``grad_weight``: it reads the stored ``E`` of all."""
    return strategy == "store" and inputs.saves_e and inputs.trained


def _cuts(inputs: PlanInputs, strategy: str, shortest: int) -> Iterator[Cut]:
    """Ways to cut the tokens: the user's, or from the longest chunks downwards."""
    config, tokens, parts = inputs.config, inputs.num_tokens, inputs.num_parts
    tokens_per_rank = -(-tokens // parts)
    if config.num_chunks is not None:
        yield Cut.into(tokens_per_rank, config.num_chunks)
        return
    if config.chunk_tokens is not None:
        yield Cut.of_length(tokens_per_rank, max(1, config.chunk_tokens // parts))
        return
    longest = longest_chunk(inputs, strategy)
    if (
        strategy != "grad_in_forward"
        and not _may_be_at_once(inputs, strategy)
        and sums_grad_weight(inputs, 2) > sums_grad_weight(inputs, 1)
        and inputs.itemsize * (tokens - longest) <= 4 * inputs.hidden_size
    ):
        # A single chunk needs no fp32 sum of grad_weight, which saves more than the longer chunk costs.
        longest = max(longest, tokens)
    # Powers of two and three quarters of them.
    powers = range(longest.bit_length(), 0, -1)
    sizes = [size for power in powers for size in (3 << power, 2 << power) if shortest <= size < longest]
    tile = TILE_TOKENS // math.gcd(TILE_TOKENS, parts)
    for count in dict.fromkeys(max(1, -(-tokens // size)) for size in (longest, *sizes)):
        # Chunks of about equal size, so that the last one is not tiny.
        step = -(-tokens_per_rank // count)
        yield Cut.of_length(tokens_per_rank, min(-(-step // tile) * tile, tokens_per_rank) or longest)


def _options(inputs: PlanInputs, strategy: str, shortest: int | None = None) -> Iterator[Plan]:
    """All plans of a strategy except ``mixed``. An earlier one is never slower than a later one."""
    if shortest is None:
        shortest = SHORTEST_CHUNK if strategy == "recompute" else SHORTEST_FAST_CHUNK
    for at_once in (True, False) if _may_be_at_once(inputs, strategy) else (False,):
        for cut in _cuts(inputs, strategy, shortest):
            yield Plan(inputs, strategy, cut, cut.count if strategy == "store" else 0, at_once)


def _mixed(inputs: PlanInputs, budget: int, time: float = math.inf) -> Iterator[Plan]:
    """The ``mixed`` plans that fit and may be as fast as ``time``, each with as many stored chunks as fit."""
    for cut in _cuts(inputs, "mixed", SHORTEST_FAST_CHUNK):
        plans = [Plan(inputs, "mixed", cut, stored) for stored in range(1, cut.count)]
        if plans and plans[-1].relative_time <= time:
            yield from plans[: bisect_right(plans, budget, key=lambda plan: plan.predicted_peak_bytes)][-1:]


def _fastest(inputs: PlanInputs, budget: int) -> Plan:
    """The plan of ``auto``; the smallest if none fits. Steps with dynamic batches wait for it: few are predicted."""
    options = [_best(_options(inputs, strategy), budget) for strategy in _strategies(inputs)]
    fitting = [option for option in options if option.predicted_peak_bytes <= budget]
    fitting += _mixed(inputs, budget, min((option.relative_time for option in fitting), default=math.inf))
    return min(fitting, key=_rank) if fitting else _best(options, 0)


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


def _asks_for_chunks(inputs: PlanInputs) -> bool:
    return bool(inputs.config.num_chunks or inputs.config.chunk_tokens)


def _why(inputs: PlanInputs, chosen: Plan) -> str:
    memory_mb = inputs.config.memory_mb
    if inputs.promise_broken:
        return "the loss is not what grad_in_forward was promised"
    if inputs.config.strategy != "auto":
        within = f", within the budget of {memory_mb} MiB" if memory_mb else ""
        return f"asked for by name{within}" + (f"; {WAITS_IN_WORDS}" if chosen.waits_for_host else "")
    budget = budget_bytes(inputs)
    fits = chosen.predicted_peak_bytes <= budget
    limit = f"default budget{f' of {size_in_words(budget)}' if fits else ''} (what grad_in_forward needs)"
    if memory_mb:
        limit = f"budget of {memory_mb} MiB"
    if not fits:
        how = " with the chunks asked for" if _asks_for_chunks(inputs) else ""
        needed = _size(inputs, chosen.predicted_peak_bytes)
        return f"the {limit} cannot be met{how}; {chosen.strategy} needs the least, {needed}"
    others = [name for name in ("store", "grad_in_forward") if name != chosen.strategy]
    return f"the fastest within the {limit}; {', '.join(_why_not(inputs, name, budget) for name in others)}"


def _why_not(inputs: PlanInputs, strategy: str, budget: int) -> str:
    if strategy not in _strategies(inputs):
        return WAITS_IN_WORDS if inputs.token_weights_known else "grad_in_forward needs token weights"
    needed = _best(_options(inputs, strategy), budget).predicted_peak_bytes
    if needed <= budget:
        return f"{strategy} is no faster"
    size = _size(inputs, needed)
    return f"{strategy} needs {'slightly more' if size == _size(inputs, budget) else size}"


def _size(inputs: PlanInputs, num_bytes: int) -> str:
    """In whole MiB, as a budget names it, if a budget was given."""
    return f"{-(-num_bytes // MIB)} MiB" if inputs.config.memory_mb else size_in_words(num_bytes)
