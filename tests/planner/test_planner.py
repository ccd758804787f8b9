"""The planner: its choices one by one, and the properties that hold for all of them."""

from __future__ import annotations

import contextlib
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fused_ce import FusedCEConfig
from megatron_fused_ce.planner import choose, memory
from megatron_fused_ce.planner.choose import alternatives, plan
from megatron_fused_ce.planner.memory import PlanInputs
from megatron_fused_ce.scripts.dev.figures_plan import chunk_by_chunk
from megatron_fused_ce.scripts.lib import results as committed_results

ROOT = Path(__file__).resolve().parents[2]

MIB = 2**20
CHOICES = {field.name for field in fields(FusedCEConfig)} - {"logits_backend"}
SIZES = {"num_tokens", "hidden_size", "num_rows"}


def inputs_of(*sizes, **given) -> PlanInputs:
    """Of a plan; the config's fields among the others."""
    return changed(PlanInputs(*sizes, **{name: given.pop(name) for name in SIZES & given.keys()}), **given)


def changed(inputs: PlanInputs, **given) -> PlanInputs:
    choices = {name: given.pop(name) for name in CHOICES & given.keys()}
    return replace(inputs, config=replace(inputs.config, **choices), **given)


def llama(num_tokens: int, memory_mb: int | None = None, **others) -> PlanInputs:
    """A head of H = 4096 and V = 128256: 1002 MiB of bf16 logits are 4096 tokens."""
    facts = {"token_weights_known": True, "device": "NVIDIA H200", **others}
    return inputs_of(num_tokens, facts.pop("hidden_size", 4096), 128256, memory_mb=memory_mb, **facts)


def small(of_the_crossing: float, **others) -> PlanInputs:
    """A head too long for ``store``, with so much of the FLOP from which the wait of grad_in_forward is
    hidden."""
    tokens, hidden_size = 16384, 1024
    rows = of_the_crossing * choose.SMALLEST_FLOP_TO_WAIT / (6 * tokens * hidden_size)
    return changed(llama(tokens, **others), hidden_size=hidden_size, num_rows=int(rows))


UNWEIGHTED = {"token_weights_known": False}
STORES = {**UNWEIGHTED, "may_store": True}
RETURNED = {"wgrad_accumulator": "returned"}
SP4 = {"tp_size": 4, "num_parts": 4}
SHORTER = inputs_of(19892, 5, 29, device="H200", memory_mb=66, wgrad_accumulator="low_main_grad", tp_size=2,
                    num_parts=2)  # fmt: skip


@pytest.mark.parametrize(
    ("inputs", "strategy", "count", "capacity", "stored", "words"),
    [
        # Without a budget: what grad_in_forward needs.
        (llama(1024), "store", 1, 1024, 1, "default budget"),
        (llama(8192), "store", 1, 8192, 1, "grad_in_forward is no faster"),
        # 2*T*V is what grad_in_forward takes; shorter chunks have smaller buffers beside it.
        (llama(16384), "store", 2, 8192, 2, "default budget"),
        (llama(32768), "grad_in_forward", 4, 8192, 0, "store needs"),
        (llama(32768, **UNWEIGHTED), "mixed", 8, 4096, 3, "grad_in_forward needs token weights"),
        # The last pass over grad_weight costs less than one tenth of a fourth product.
        (llama(17408), "grad_in_forward", 3, 5888, 0, "store needs"),
        # A budget.
        (llama(32768, 9000), "store", 4, 8192, 4, "budget of 9000 MiB"),
        (llama(32768, 8130), "grad_in_forward", 4, 8192, 0, "store is no faster"),
        (llama(32768, 8130, **UNWEIGHTED), "store", 8, 4096, 8, "grad_in_forward needs token weights"),
        (llama(32768, 2500), "grad_in_forward", 22, 1536, 0, "budget of 2500 MiB"),
        (llama(32768, 2250), "mixed", 8, 4096, 1, "grad_in_forward needs 2333 MiB"),
        (llama(32768, 1000), "recompute", 11, 3072, 0, "grad_in_forward needs 2333 MiB"),
        (llama(1024, 330), "store", 1, 1024, 1, "grad_in_forward needs"),
        # Over ranks two chunks of logits are under way: what grad_in_forward needs is more, and store fits.
        (llama(24000), "grad_in_forward", 3, 8064, 0, "store needs"),
        (llama(24000, tp_size=4), "store", 3, 8064, 3, "grad_in_forward is no faster"),
        # With sequence parallelism four chunks of hidden states as well, 128 MiB of 4096 tokens.
        (llama(32768, 4200, **SP4), "grad_in_forward", 11, 3072, 0, "store needs"),
        # A budget that nothing meets: the least there is, and what it needs.
        (llama(32768, 50), "recompute", 128, 256, 0, "cannot be met"),
        # Where grad_weight is returned in bf16, one chunk needs no fp32 sum.
        (llama(4096, wgrad_accumulator="returned"), "store", 1, 4096, 1, "default budget"),
        (llama(12000, strategy="recompute", tp_size=2, **RETURNED), "recompute", 1, 12000, 0, ""),
        (llama(17000, strategy="recompute", tp_size=2, **RETURNED), "recompute", 3, 5760, 0, ""),
        # Row kernels: store needs a chunk more.
        (llama(16384, logits_backend="gemm_rows"), "grad_in_forward", 2, 8192, 0, "store needs"),
        # Multi-token prediction: three heads wait for their backward.
        (llama(16384, 9000, uses_in_flight=3), "grad_in_forward", 2, 8192, 0, "store needs 12130 MiB"),
        # Chunks that were asked for stay; auto chooses the strategy for them.
        (llama(32768, num_chunks=3), "grad_in_forward", 3, 10923, 0, "store needs"),
        (llama(8192, chunk_tokens=1000), "store", 9, 1000, 9, "default budget"),
        (llama(32768, 5000, chunk_tokens=1000, **UNWEIGHTED), "mixed", 33, 1000, 19, "budget"),
        (llama(32768, 100, num_chunks=4), "recompute", 4, 8192, 0, "with the chunks asked for"),
        # By name.
        (llama(100000, strategy="store"), "store", 13, 7808, 13, "asked for by name"),
        (llama(32768, 2400, strategy="grad_in_forward"), "grad_in_forward", 32, 1024, 0, "asked for by name"),
        (llama(50, strategy="store", num_chunks=9), "store", 9, 6, 9, "asked for by name"),
        (llama(0), "store", 0, 0, 0, "default budget"),
        # On both sides of the crossing; the CPU is the host.
        (small(1.01), "grad_in_forward", 2, 8192, 0, "store needs"),
        (small(0.99), "mixed", 8, 2048, 4, "waits for the host"),
        (small(0.99, device="cpu"), "grad_in_forward", 4, 4096, 0, "store needs"),
        (small(0.99, strategy="grad_in_forward"), "grad_in_forward", 2, 8192, 0, "waits for the host"),
        # grad_weight at once fits with shorter chunks alone.
        (SHORTER, "store", 20, 1024, 20, "budget of 66 MiB"),
        # Without token weights and a budget: one copy of the logits, up to 4 GiB.
        (llama(16384, hidden_size=1024, **UNWEIGHTED), "mixed", 8, 2048, 4, "store needs"),
        (llama(16384, hidden_size=1024, **STORES), "store", 2, 8192, 2, "what store needs"),
        (llama(16800, hidden_size=1024, **STORES), "mixed", 9, 1920, 3, "what grad_in_forward needs"),
        # A device that nobody measured.
        (llama(32768, device="Other"), "grad_in_forward", 8, 4096, 0, "store needs"),
    ],
)
def test_choices(inputs, strategy, count, capacity, stored, words):
    chosen = plan(inputs)
    came = (chosen.strategy, chosen.count, chosen.capacity, chosen.stored_chunks)
    assert came == (strategy, count, capacity, stored), chosen.why
    assert words in chosen.why
    assert "\n" not in chosen.why


def test_a_hopper_is_known_by_a_word_of_its_name():
    hoppers = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", "Hopper")
    for device in (*hoppers, "NVIDIA H2000", "other GPU", "cpu"):
        inputs = inputs_of(1, 1, 1, device=device)
        lengths = [choose.longest_chunk(inputs, of) for of in ("store", "recompute", "mixed")]
        assert lengths == [8192, *2 * [8192 if device in hoppers else 4096]]


LOGITS, HIDDEN, TILES = 4000 * 1000, 4000 * 64, 8 * 2000 * 4
SUM = 4 * 1000 * 64
RANKS = {"tp_size": 2}
#: H_t of 32 in bf16: logits and some statistics of a token, and with sequence parallelism its hidden states.
BESIDE = {"second_hidden_size": 32, "second_itemsize": 2, "logits_backend": "gemm_rows"}
OF_TEACHER = 2000 * (2 * 1000 + 4 * 80)
#: And all of its hidden states, where the backward reads them.
COPY = 2 * 32 * 5000


@pytest.mark.parametrize(
    ("strategy", "others", "expected"),
    [
        # T = 5000 in chunks of 2000, H = 64, V = 1000 (4 tiles of 256 columns), bf16.
        ("recompute", {}, LOGITS),
        # grad_weight in one GEMM reads the scaled hidden states of all tokens.
        ("store", {}, 10000 * 1000 + 10000 * 64),
        # So it needs no fp32 sum, and no more of it where it is returned.
        ("store", RETURNED, 10000 * 1000 + 10000 * 64),
        # Three heads wait for their backward together.
        ("store", {"uses_in_flight": 3}, 3 * 10000 * 1000 + 10000 * 64 + 2 * 32 * 5000),
        ("grad_in_forward", {}, LOGITS + HIDDEN + TILES + SUM),
        # Its forward, with what the product leaves of each tile.
        ("store", {"wgrad_accumulator": "none"}, 10000 * 1000 + TILES),
        ("store", {"logits_backend": "gemm_rows"}, 10000 * 1000 + LOGITS),
        ("store", {"saves_logits": True}, 10000 * 1000 + LOGITS),
        ("recompute", {"saves_logits": True}, LOGITS),
        ("store", {"logits_backend": "gemm_rows", "dtype": "float32"}, 20000 * 1000 + 2 * LOGITS),
        ("recompute", {"logits_backend": "gemm_rows", **RETURNED}, LOGITS + SUM),
        ("recompute", {"logits_backend": "gemm_rows", "dtype": "float16"}, LOGITS + SUM),
        # Beside a teacher. Gradients are saved, in the matrix of the logits.
        ("store", {**BESIDE, "dtype": "float16"}, 10000 * 1000 + OF_TEACHER),
        ("recompute", {**BESIDE, "second_itemsize": 4}, 2 * LOGITS + OF_TEACHER + HIDDEN + 2 * COPY),
        # Made again, they take more than in the forward, where H is so small.
        ("grad_in_forward", BESIDE, LOGITS + OF_TEACHER + HIDDEN + COPY),
        ("grad_in_forward", {**BESIDE, "hidden_size": 128}, LOGITS + OF_TEACHER + 2 * HIDDEN + 2 * SUM),
        # On 2 ranks of the same V. Backwards: one gathered chunk waited for it, two are under way, one is
        # unreduced; three heads wait together. Measured is the rest: parallel/test_memory.py.
        ("recompute", {**RANKS, "num_parts": 2, "uses_in_flight": 3}, LOGITS + 6 * HIDDEN + 64 * 5000),
        # Three ranks give 22 rows each; a chunk waits for its seal beside the next.
        ("store", {"hidden_size": 1, "tp_size": 3}, 5 * LOGITS // 2 + 2 * TILES + 2 * 64 * 2000 + 132),
        ("store", {"num_tokens": 0, **RANKS, "num_parts": 2}, -32 * 5000),
        ("grad_in_forward", {"num_tokens": 0, **RANKS, "num_parts": 2}, SUM - 32 * 5000),
        ("recompute", {"num_tokens": 0, **RANKS, **RETURNED}, SUM - 32 * 5000),
    ],
)
def test_predicted_bytes_of_worked_examples(strategy, others, expected):
    sizes = {"num_tokens": 5000, "hidden_size": 64, "num_rows": 1000, "chunk_tokens": 2000}
    chosen = plan(inputs_of(strategy=strategy, **{**sizes, **others}))
    assert chosen.predicted_peak_bytes == expected + 32 * 5000 + 40 * chosen.capacity + 64 * MIB


@st.composite
def heads(draw) -> PlanInputs:
    """Any head that a run could have, with nothing asked for and no budget."""
    tp_size = draw(st.sampled_from([1, 2, 4, 8]))
    num_parts = draw(st.sampled_from([1, tp_size]))
    return inputs_of(
        num_tokens=num_parts * draw(st.integers(0, 70000 // num_parts)),
        hidden_size=draw(st.integers(1, 16384)),
        num_rows=draw(st.integers(1, 300000)),
        dtype=draw(st.sampled_from(["bfloat16", "bfloat16", "float16", "float32"])),
        num_parts=num_parts,
        tp_size=tp_size,
        wgrad_accumulator=draw(st.sampled_from(memory.WGRAD_ACCUMULATORS)),
        token_weights_known=draw(st.booleans()),
        **draw(st.sampled_from([{}, {"saves_logits": True}, {"logits_backend": "gemm_rows"}])),
        device=draw(st.sampled_from(["NVIDIA H200", "NVIDIA H200", "cpu", "Other"])),
        uses_in_flight=draw(st.integers(1, 3)),
        **draw(st.sampled_from([{}, {}, {"second_hidden_size": 4096, "second_itemsize": 2}])),
    )


#: MiB, small ones as likely as large ones.
budgets = st.integers(0, 17).flatmap(lambda bits: st.integers(2**bits, 2 ** (bits + 1)))
CHUNKINGS = st.one_of(
    st.just({}),
    st.builds(lambda n: {"num_chunks": n}, st.integers(1, 200)),
    st.builds(lambda n: {"chunk_tokens": n}, st.integers(100, 40000)),
)
many = settings(max_examples=300, deadline=None)


def may_differentiate(inputs: PlanInputs) -> bool:
    """In the forward, when nobody asks for it by name."""
    return inputs.token_weights_known and not choose.shows_the_wait(inputs)


def open_to(inputs: PlanInputs) -> list[str]:
    """Strategies that ``auto`` may take."""
    return ["store", "recompute", *(["grad_in_forward"] if may_differentiate(inputs) else [])]


@many
@given(heads(), st.none() | budgets, CHUNKINGS)
def test_planned_chunks_are_those_that_will_run(inputs, memory_mb, chunking):
    """Chunks cover each part in order, none is empty, the longest is the one that bytes are predicted for."""
    inputs = changed(inputs, memory_mb=memory_mb, **chunking)
    part = inputs.num_tokens // inputs.num_parts
    for chosen in (plan(inputs), *alternatives(inputs)):
        chunks = chosen.cut.chunks
        bounds = [0, *(chunk.stop for chunk in chunks)]
        assert bounds == [*(chunk.start for chunk in chunks), part]
        sizes = [(chunk.stop - chunk.start) * inputs.num_parts for chunk in chunks]
        assert (chosen.count, chosen.capacity) == (len(sizes), max(sizes, default=0))
        assert min(sizes, default=1) > 0
        if "num_chunks" in chunking:
            assert len(sizes) == min(chunking["num_chunks"], part)
            assert max(sizes, default=0) - min(sizes, default=0) <= inputs.num_parts
        elif "chunk_tokens" in chunking:
            length = max(1, chunking["chunk_tokens"] // inputs.num_parts) * inputs.num_parts
            assert set(sizes[:-1]) <= {length}
        in_part = {"store": len(sizes), "mixed": chosen.stored_chunks}
        assert chosen.stored_chunks == in_part.get(chosen.strategy, 0)
        assert chosen.strategy != "mixed" or 0 < chosen.stored_chunks < len(sizes)


@many
@given(heads(), budgets)
def test_within_the_budget_wherever_anything_fits(inputs, memory_mb):
    """No strategy by name is then faster, in any chunks that the table allows; else none needs less."""
    chosen = plan(changed(inputs, memory_mb=memory_mb))
    needed = chosen.predicted_peak_bytes
    met = needed <= memory_mb * MIB
    assert ("cannot be met" in chosen.why) != met
    assert met or f"needs the least, {-(-needed // MIB)} MiB" in chosen.why
    for strategy in open_to(inputs):
        if met:
            with contextlib.suppress(ValueError):
                named = plan(changed(inputs, memory_mb=memory_mb, strategy=strategy))
                if named.capacity >= 1024 or strategy == "recompute":
                    assert chosen.relative_time <= named.relative_time, strategy
            continue
        # The others are never cut shorter than is fast, whatever a few rows or a frozen weight would save.
        short = (256, 700) if strategy == "recompute" else ()
        for size in {*short, 1024, 8192, max(256, inputs.num_tokens)}:
            asked = changed(inputs, strategy=strategy, chunk_tokens=size)
            assert plan(asked).predicted_peak_bytes >= needed, (strategy, size)


@many
@given(heads(), budgets, budgets, CHUNKINGS)
def test_more_budget_is_never_slower(inputs, one, other, chunking):
    low, high = (plan(changed(inputs, memory_mb=memory_mb, **chunking)) for memory_mb in sorted((one, other)))
    assert high.relative_time <= low.relative_time


@many
@given(heads())
def test_no_budget_is_what_grad_in_forward_needs(inputs):
    chosen = plan(inputs)
    grad_in_forward = plan(changed(inputs, strategy="grad_in_forward"))
    if "cannot be met" in chosen.why:
        # A few tokens or rows, whose hidden states outweigh their logits: they wait for the backward.
        few_rows = inputs.num_rows < max(4 * inputs.hidden_size, 64)
        assert not may_differentiate(inputs) and (inputs.num_tokens <= 512 or few_rows)
        return
    assert chosen.predicted_peak_bytes <= grad_in_forward.predicted_peak_bytes
    assert chosen.strategy != "grad_in_forward" or may_differentiate(inputs)


@many
@given(heads(), st.none() | budgets)
def test_chunks_no_longer_than_the_table(inputs, memory_mb):
    """But for one chunk of all tokens where that saves the fp32 sum of grad_weight."""
    chosen = plan(changed(inputs, memory_mb=memory_mb))
    longest = choose.longest_chunk(inputs, chosen.strategy)
    if chosen.capacity > longest:
        assert chosen.count == 1 and inputs.wgrad_accumulator == "returned"
        assert chosen.memory.grad_weight_sum == 0
    if chosen.strategy != "recompute" and chosen.count > 1:
        assert chosen.capacity >= 512  # of equal size: half of 1024 at the least


RESULTS = ROOT / "docs" / "benchmarks" / "results"
#: The sweep over chunk_tokens on one rank, and the pipeline over one, two and four.
SWEEP = "chunks"
OVER_RANKS = ("tp1-after-pipeline", "tp2", "tp4-reach", "tp4-reach-llama3-70b")


def measured_rows(name: str):
    """(inputs, measured row) of committed results."""
    for row in committed_results.rows(RESULTS / f"2026-11-21-h200-{name}.json"):
        strategy = row["variant"].split("/")[0]
        if strategy in ("store", "grad_in_forward", "recompute"):
            asked = {"strategy": strategy, "chunk_tokens": int(row["chunk_tokens"])}
            ranks = {"tp_size": row["tp"], "num_parts": row["tp"] if row["sp"] else 1}
            yield inputs_of(row["T"], row["H"], row["V"], device="NVIDIA H200", **asked, **ranks), row


@pytest.mark.parametrize("name", [SWEEP, *OVER_RANKS])
def test_predictions_against_h200s(name):
    """Bytes never below; above by at most a workspace that grad_in_forward's backward needs not, and 2 MiB.
    Time on one rank as close as clocks are from run to run."""
    rows = list(measured_rows(name))
    assert len(rows) > 2
    for inputs, row in rows:
        predicted, strategy = chunk_by_chunk(inputs), inputs.config.strategy
        peak_mib = predicted.predicted_peak_bytes / MIB
        if name == SWEEP and strategy == "grad_in_forward" and predicted.count > 1:
            # That commit held the tile statistics of two chunks.
            peak_mib += predicted.memory.tile_statistics / MIB
        assert row["peak_mib"] - 0.1 <= peak_mib <= row["peak_mib"] + 34
        over_products = row["ratio"] * (4 / 3 if strategy == "recompute" else 1)
        assert name != SWEEP or predicted.relative_time == pytest.approx(over_products, abs=0.025)


ONE, FOUR = {"num_chunks": 1}, {"num_chunks": 4}
#: Row kernels read and write a chunk's logits; grad_weight is read and written again by each chunk.
ROWS, PASS = 172 / 4096, 130 / 32768
TEACHER = {"second_hidden_size": 4096, "second_itemsize": 2, **ONE}
#: Of a head of T = 32768: its config and inputs, and its time over that of its bare GEMMs.
TIMES = [
    ("store", ONE, 1),
    ("recompute", ONE, 4 / 3),
    ("store", FOUR, 1),
    ("grad_in_forward", ONE, 1 + 355 / 32768),
    ("store", {"logits_backend": "gemm_rows", **ONE}, 1 + ROWS),
    ("store", {"logits_backend": "gemm_rows", **FOUR}, 1 + ROWS + 3 * 205 / 32768),
    # Gradients read stored logits and write; gemm_rows reads once more. Computed again they take no pass.
    ("store", {"saves_logits": True, **FOUR}, 1 + ROWS * 2 / 3 + 3 * PASS),
    ("recompute", {"saves_logits": True, **ONE}, 4 / 3),
    # Half of the bytes: the sum is read and bf16 is written.
    ("grad_in_forward", {**RETURNED, **ONE}, 1 + 355 / 2 / 32768),
    # Two products are the roof of a frozen weight, three with the logits again.
    ("recompute", {"wgrad_accumulator": "none", **FOUR}, 3 / 2),
    ("auto", {"num_chunks": 8, "memory_mb": 5150, **UNWEIGHTED}, 1 + 1 / 6 + 7 * PASS),  # 4 of 8 are stored
    # Beside a teacher of four GEMMs, or of five where H_t is 2 H: six and eight by recompute. Both sides'
    # logits are read twice and one matrix is written.
    ("store", TEACHER, 1 + ROWS * 5 / 4),
    ("store", {**TEACHER, "logits_backend": "gemm_rows"}, 1 + ROWS * 5 / 4),
    ("recompute", TEACHER, 6 / 4 + ROWS * 5 / 4),
    ("recompute", {**TEACHER, "second_hidden_size": 8192}, 8 / 5 + ROWS),
    ("recompute", {**TEACHER, "wgrad_accumulator": "none"}, 5 / 3 + ROWS * 5 / 3),
    ("grad_in_forward", TEACHER, 1 + ROWS * 5 / 4 + 355 / 32768 * 3 / 4),
    ("auto", {"num_tokens": 0}, 1),
]


@pytest.mark.parametrize(("strategy", "others", "expected"), TIMES)
def test_predicted_time_of_worked_examples(strategy, others, expected):
    inputs = changed(llama(32768, strategy=strategy), **others)
    assert plan(inputs).relative_time == pytest.approx(expected)


@pytest.mark.parametrize(
    ("others", "advice"),
    [
        ({"strategy": "store"}, "choose strategy 'auto'"),
        ({"strategy": "grad_in_forward"}, "--fused-ce-memory-mb"),
        ({"strategy": "recompute", "num_chunks": 2}, "ask for shorter chunks"),
    ],
)
def test_a_named_strategy_that_cannot_fit(others, advice):
    """Says the figure; that figure is enough, and one MiB less is not."""
    with pytest.raises(ValueError, match=advice) as said:
        plan(llama(32768, 100, **others))
    words = str(said.value)
    needed = int(words.split("--fused-ce-memory-mb) ")[1].split()[0])
    assert others["strategy"] in words and "100 MiB" in words
    assert plan(llama(32768, needed, **others)).strategy == others["strategy"]
    with pytest.raises(ValueError, match=f"{needed} or more"):
        plan(llama(32768, needed - 1, **others))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("strategy", "fast", "choose one of auto"),
        *((name, 0, f"{name} must be 1 or more, got 0") for name in ("num_rows", "memory_mb", "num_chunks")),
    ],
)
def test_inputs_that_do_not_fit(field, value, words):
    with pytest.raises(ValueError, match=words):
        changed(llama(100), **{field: value})


def test_its_sizes_are_those_of_the_kernels():
    """Which it cannot import: it answers without torch and triton."""
    from megatron_fused_ce.kernels import scaled_exp

    assert scaled_exp.TILING.block_n == memory.TILE_COLUMNS


def test_no_size_is_the_reason_against_its_equal():
    """65 MiB were the reason against 65 MiB; whole MiB of a budget tell any two apart."""
    close = inputs_of(4288, 1024, 50304, token_weights_known=True, device="cpu")
    assert plan(close).why == (
        "the fastest within the default budget of 413 MiB (what grad_in_forward needs); "
        "store needs slightly more"
    )
    whys = [plan(changed(close, num_tokens=n)).why for n in range(3000, 5000, 100)]
    whys += [plan(changed(close, num_tokens=n, memory_mb=413)).why for n in range(3000, 5000, 100)]
    for why in whys:
        sizes = re.findall(r"[\d.]+ [MG]iB", why)
        assert len(set(sizes)) == len(sizes), why


def test_sizes_in_words():
    sizes = (0, MIB, 10 * MIB, 416 * MIB + 9, 1024 * MIB, 1844 * MIB)
    words = ["0.0 MiB", "1.0 MiB", "10 MiB", "416 MiB", "1.0 GiB", "1.8 GiB"]
    assert [memory.size_in_words(size) for size in sizes] == words
