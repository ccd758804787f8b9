"""The cost model: constants that are known come back, and it says what it lacks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_fused_ce.scripts.dev import figures_scaling as fit_scaling
from megatron_fused_ce.scripts.dev.figures_scaling import Case, Link, Model

RATE = 700e12
LINK = Link(2e-5, fit_scaling.NVLINK_STEP_S, 300e9, "known")
KNOWN = {"accumulation": 1.5e-13, "passes": 2.5e-13, "chunk": 4e-5, "company": 2e-4, "contention": 0.3}
MODEL = Model(RATE, (RATE, RATE), LINK, KNOWN, {})
SHAPES = {"llama-3-8b": (4096, 128256), "qwen3-1.7b": (2048, 151936)}


def roof_row(shape: str, num_tokens: int, ranks: int) -> dict:
    hidden_size, vocab = SHAPES[shape]
    row = {"shape": shape, "T": num_tokens, "H": hidden_size, "V": vocab // ranks, "tp": ranks}
    time_ms = 6e3 * num_tokens * hidden_size * (vocab // ranks) / RATE
    return {**row, "variant": "roof", "time_ms": time_ms, "device": "NVIDIA H200"}


def rows_of(model: Model, noise: float = 0.0) -> list[dict]:
    """What scripts/bench/benchmark.py would write if the model were the truth."""
    random = np.random.default_rng(0)
    rows = []
    for shape in SHAPES:
        for ranks in (1, 2, 4):
            for num_tokens in (8192, 32768):
                roof = roof_row(shape, num_tokens, ranks)
                rows.append(roof)
                for sp in (False, True) if ranks > 1 else (False,):
                    for strategy in fit_scaling.STRATEGIES:
                        for chunk_tokens in (4096, 8192):
                            case = Case(num_tokens, roof["H"], roof["V"], ranks, sp, strategy, chunk_tokens)
                            roof_ms = roof["time_ms"] * case.products / 3
                            time_ms = 1e3 * model.time_s(case, roof_ms * 1e-3)
                            time_ms *= 1 + noise * random.standard_normal()
                            of_it = {"sp": sp, "variant": strategy, "chunk_tokens": chunk_tokens}
                            of_it |= {"logits_backend": "scaled_exp", "roof_ms": roof_ms, "time_ms": time_ms}
                            rows.append({**roof, **of_it})
    return rows


def profile_rows(link: Link, late: float = 1.0) -> list[dict]:
    """What scripts/bench/profile.py would: of ours a reduce-scatter a chunk, of TE's layer all at once."""
    rows = []
    for num_tokens in (8192, 32768):
        whole = link.time_s(4, 2.0 * num_tokens * 4096) * 1e3
        chunk = link.time_s(4, 2.0 * 8192 * 4096) * 1e3
        count = num_tokens // 8192
        head = {"tp": 4, "sp": True, "shape": "llama-3-8b", "T": num_tokens}
        te = [["all-gather", "x", 2.0, 2 * whole], ["reduce-scatter", "y", 1.0, whole]]
        # Our gathers bring statistics along and are left out; a rank that waits takes longer.
        ours = [["all-gather", "x", 9.0, 99.0], ["reduce-scatter", "y", count, count * chunk]]
        slow = [["reduce-scatter", "y", count, late * count * chunk]]
        rows.append({**head, "variant": "megatron-te", "kernels": te})
        rows.append({**head, "variant": "store", "kernels": ours})
        rows.append({**head, "variant": "store", "kernels": slow})
    return rows


def test_known_constants_come_back():
    model = fit_scaling.fit(rows_of(MODEL) + profile_rows(LINK, late=3.0))
    assert model.rate == pytest.approx(RATE)
    assert model.link.latency_s == pytest.approx(LINK.latency_s)
    assert model.link.bytes_per_s == pytest.approx(LINK.bytes_per_s)
    for name, value in KNOWN.items():
        assert model.constants[name] == pytest.approx(value, rel=1e-6), name


def test_known_constants_come_back_from_noise_within_their_errors():
    model = fit_scaling.fit(rows_of(MODEL, noise=0.005) + profile_rows(LINK))
    for name, value in KNOWN.items():
        assert abs(model.constants[name] - value) <= 4 * model.errors[name], name
    assert model.errors["contention"] < 0.5 * KNOWN["contention"]


@pytest.mark.parametrize("name", list(KNOWN))
def test_each_constant_is_told_from_the_others(name):
    """Doubled, it alone comes back doubled."""
    other = {**KNOWN, name: 2 * KNOWN[name]}
    model = fit_scaling.fit(rows_of(replace(MODEL, constants=other)), LINK)
    assert model.constants == pytest.approx(other, rel=1e-6)


def test_a_constant_that_would_be_negative_is_0():
    """Products faster than the roof's: nothing is below 0, and what is 0 has no error."""
    without = {**KNOWN, "company": -1e-4}
    model = fit_scaling.fit(rows_of(replace(MODEL, constants=without)), LINK)
    assert model.constants["company"] == 0 and "company" not in model.errors
    assert all(value >= 0 for value in model.constants.values())


def test_rows_of_one_rank_leave_the_others_constants_at_0():
    rows = [row for row in rows_of(MODEL) if row["tp"] == 1]
    model = fit_scaling.fit(rows)
    assert model.link is fit_scaling.ASSUMED
    assert model.constants["company"] == model.constants["contention"] == 0
    assert model.constants["accumulation"] == pytest.approx(KNOWN["accumulation"], rel=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"time_ms": None},  # out of memory
        {"logits_backend": "gemm_rows"},
        {"variant": "auto"},
        {"variant": "megatron-te"},
        {"wgrad_accumulator": "returned"},
        {"chunk_tokens": None},
    ],
)
def test_rows_that_the_model_is_not_of_are_left_out(change):
    row = next(row for row in rows_of(MODEL) if row["variant"] == "store")
    assert fit_scaling.case_of(row) is not None
    assert fit_scaling.case_of({**row, **change}) is None


def test_collectives_that_no_product_hides():
    """A product of 1 ms: of gathers of 0.3, 0.9 and 1.4 ms the first and the part above 1 ms show."""
    rate = 2.0 * 8192 * 4096 * 32064 / 1e-3
    for gather_ms, late_ms in ((0.3, 0.0), (0.9, 0.0), (1.4, 0.4)):
        link = Link(0.0, 0.0, 2.0 * 8192 * 4096 * 3 / 4 / (gather_ms * 1e-3), "")
        case = Case(4 * 8192, 4096, 32064, 4, True, "grad_in_forward", 8192)
        seen = fit_scaling.collectives(case, link, rate)
        statistics_s = link.time_s(4, 16.0 * 8192 * 4)
        assert seen.ends_s == pytest.approx(gather_ms * 1e-3)
        # Three gathers and four reductions after the first; statistics are short.
        assert seen.too_long_s == pytest.approx(7 * late_ms * 1e-3, abs=1e-9)
        assert seen.all_s == pytest.approx(8 * gather_ms * 1e-3 + 4 * statistics_s)
        assert seen.hidden_s == pytest.approx(seen.all_s - seen.exposed_s)


def test_what_a_ring_takes():
    """Four ranks: three steps and three quarters of the bytes; an all-reduce twice that."""
    link = Link(5e-6, 1e-6, 100e9, "")
    assert link.time_s(4, 4e6) == pytest.approx(5e-6 + 3e-6 + 3e6 / 100e9)
    assert link.time_s(4, 4e6, passes=2) == pytest.approx(5e-6 + 6e-6 + 6e6 / 100e9)
    assert link.time_s(1, 4e6) == 0


def test_limits():
    """A product of 2*C*H*V FLOP takes as long as 3/4 * 2*C*H bytes at V = 3/4 * rate / bandwidth."""
    assert fit_scaling.smallest_shard(MODEL, 4) == pytest.approx(0.75 * 700e12 / 300e9)
    tokens = fit_scaling.shortest_chunk(MODEL, (4096, 128256), 4)
    lost = 1.5e-13 * 8 * 32064 * 4096 + 4e-5 + 3 * (2e-5 + 3 * 3.4e-6)
    assert lost / (6 * tokens * 4096 * 32064 / RATE) == pytest.approx(0.05)


def test_the_tables_say_what_was_fitted():
    rows = rows_of(MODEL) + profile_rows(LINK)
    model = fit_scaling.fit(rows)
    said = fit_scaling.tables(model, rows, ["rows.json"])
    assert "| `K` | 0.3 ± " in said and "| `b` | 300 |" in said and "| `P` | 700 (700 to 700) |" in said
    case = Case(32768, 4096, 8016, 16, True, "store", 8192)
    assert f"| 32768 | 16 | 8016 | {model.ratio(case):.2f} |" in said
    assert f"| {fit_scaling.peak_gib(case, 'NVIDIA H200'):.2f} |" in said
    exact = [line for line in said.splitlines() if line.endswith(("| +0.000 |", "| -0.000 |"))]
    assert len(exact) == sum(row["variant"] != "roof" and row["tp"] > 1 for row in rows_of(MODEL))
    assert "| 2 SP | store |" in said and "| 1 | store |" not in said


@pytest.mark.parametrize(
    ("rows", "words"),
    [([], "no row named 'roof'"), ([roof_row("llama-3-8b", 8192, 1)], "no row of store, grad_in_forward or")],
)
def test_rows_that_nothing_can_be_fitted_to(rows, words):
    with pytest.raises(ValueError, match=words):
        fit_scaling.fit(rows)
