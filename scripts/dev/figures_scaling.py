"""Fits a cost model of the head to committed results and carries it on to more ranks and tokens.

The model is docs/scaling.md's. From rows of `python -m scripts.bench`: the rate of the products, and by least
squares, none below 0, what a byte of the accumulation costs, a byte of the other passes, a chunk, the
company of other ranks, and a second of collectives that run under products. From rows of
`--preset profile`: latency and bandwidth of the link. Needs no torch and no device. `make figures` puts the
tables into the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megatron_fused_ce.command_line import UsageError
from megatron_fused_ce.kernels.sizes import TILE_COLUMNS
from megatron_fused_ce.planner import PlanInputs, plan
from megatron_fused_ce.scripts.lib import results
from megatron_fused_ce.scripts.lib.results import REPOSITORY, Row
from megatron_fused_ce.scripts.lib.tables import markdown

RESULTS = REPOSITORY / results.RESULTS
#: Names of results from here on are of commits that make grad_weight of store in one GEMM; the model, and so
#: the table, knows it chunk by chunk.
FIRST_WITH_ONE_GEMM = "2026-11-22"
PAGE = REPOSITORY / "docs" / "scaling.md"
STRATEGIES = ("store", "grad_in_forward", "recompute")


@dataclass(frozen=True)
class Link:
    """What a collective takes on NCCL's rings: ``latency_s + steps * step_s + bytes / bytes_per_s``.

    An all-gather or a reduce-scatter over R ranks has R - 1 steps, an all-reduce twice as many.
    """

    latency_s: float
    step_s: float
    bytes_per_s: float
    source: str

    def latencies_s(self, ranks: int, passes: int = 1) -> float:
        """Without the bytes."""
        return 0.0 if ranks == 1 else self.latency_s + passes * (ranks - 1) * self.step_s

    def time_s(self, ranks: int, whole_bytes: float, passes: int = 1) -> float:
        """Of a collective whose gathered (or unreduced) tensor has ``whole_bytes``."""
        moved = passes * (ranks - 1) * whole_bytes / ranks
        return self.latencies_s(ranks, passes) + moved / self.bytes_per_s


#: A step of a ring by NCCL's own model (src/graph/tuning.cc, simple protocol): NVLink, network. Results of
#: one number of ranks cannot tell a step from the rest of the latency.
NVLINK_STEP_S = 3.4e-6
NETWORK_STEP_S = 9.6e-6
#: Where no profile tells: about what NCCL reached over NVLink on four H200s.
ASSUMED = Link(2e-5, NVLINK_STEP_S, 280e9, "assumed: no profile was given")
#: One 400 Gb/s adapter at 90 % of its rate.
ADAPTER_BYTES_PER_S = 45e9


@dataclass(frozen=True)
class Case:
    """One head under one strategy."""

    num_tokens: int  # T
    hidden_size: int  # H
    num_rows: int  # V of this rank
    ranks: int  # R
    sequence_parallel: bool
    strategy: str
    chunk_tokens: int  # C
    packed: bool = True

    @property
    def num_chunks(self) -> int:
        return max(1, math.ceil(self.num_tokens / self.chunk_tokens))

    @property
    def largest_chunk(self) -> int:
        return min(self.num_tokens, self.chunk_tokens)

    @property
    def products(self) -> int:
        return 4 if self.strategy == "recompute" else 3

    @property
    def flop_of_a_product(self) -> float:
        return 2.0 * self.num_tokens * self.hidden_size * self.num_rows


@dataclass(frozen=True)
class Collectives:
    """Seconds of a step's: in all, and those that no product hides, at the ends and for want of time."""

    all_s: float
    ends_s: float
    too_long_s: float

    @property
    def exposed_s(self) -> float:
        return self.ends_s + self.too_long_s

    @property
    def hidden_s(self) -> float:
        return self.all_s - self.exposed_s


def collectives(case: Case, link: Link, rate: float) -> Collectives:
    """Which stand under which product: megatron_fused_ce/pipeline.py."""
    if case.ranks == 1:
        return Collectives(0.0, 0.0, 0.0)
    ranks, chunk = case.ranks, case.largest_chunk
    hidden_bytes = 2.0 * chunk * case.hidden_size
    gather = link.time_s(ranks, hidden_bytes) if case.sequence_parallel else 0.0
    reduce = link.time_s(ranks, hidden_bytes, 1 if case.sequence_parallel else 2)
    if case.packed:
        statistics = link.time_s(ranks, 16.0 * chunk * ranks)
    else:
        statistics = link.time_s(ranks, 8.0 * chunk, 2) + link.time_s(ranks, 12.0 * chunk, 2)
    product = 2.0 * chunk * case.hidden_size * case.num_rows / rate

    def too_long(*under_one_product: float) -> float:
        return max(0.0, sum(under_one_product) - product)

    n = case.num_chunks
    if case.strategy == "grad_in_forward":
        every = n * (gather + statistics + reduce)
        ends = gather + (statistics if n == 1 else 0.0)
        late = (n - 1) * too_long(gather) + n * too_long(reduce)
        late += (n - 1) * too_long(statistics)
        return Collectives(every, ends, late)
    # The backward begins with the chunk that the forward gathered last.
    every = n * (gather + statistics) + (n - 1) * gather + n * reduce
    late = (n - 1) * (too_long(gather, statistics) + too_long(gather)) + n * too_long(reduce)
    return Collectives(every, gather + statistics, late)


#: Carried on to these, H and V over all ranks, with chunks of so many tokens.
HEADS = ((4096, 128256), (8192, 128256))
RANKS, TOKENS, CHUNK_TOKENS = (1, 2, 4, 8, 16, 32, 64), (32768, 1048576), 8192
#: Of its three products a chunk may lose this.
SHARE = 0.05

#: What is fitted, in the order of the columns; unit and scale for the table.
CONSTANTS = (
    ("accumulation", "A", "ps a byte of the fp32 sum that one chunk more reads and writes", 1e12),
    ("passes", "M", "ps a byte of the other passes", 1e12),
    ("chunk", "L", "us a chunk", 1e6),
    ("company", "S", "us a step over several ranks", 1e6),
    ("contention", "K", "seconds that a second of collectives costs the GEMMs above it", 1.0),
)


def columns(case: Case, link: Link, rate: float) -> list[float]:
    """What each constant is multiplied by."""
    tokens, hidden_size, rows = case.num_tokens, case.hidden_size, case.num_rows
    own = tokens // case.ranks if case.sequence_parallel else tokens
    passed = 2.0 * tokens * hidden_size  # row_prologue
    passed += 16.0 * tokens * math.ceil(rows / TILE_COLUMNS)  # statistics of tiles, there and back
    if case.strategy != "recompute":
        passed += 4.0 * tokens * hidden_size + 4.0 * own * hidden_size  # rows times their factor
    if case.strategy == "grad_in_forward":
        passed += 12.0 * rows * hidden_size  # the last pass over grad_weight
    return [
        8.0 * rows * hidden_size * (case.num_chunks - 1),
        passed,
        float(case.num_chunks),
        float(case.ranks > 1),
        collectives(case, link, rate).hidden_s,
    ]


@dataclass(frozen=True)
class Model:
    """Everything fitted, in SI units."""

    rate: float  # FLOP/s of the products
    rate_spread: tuple[float, float]
    link: Link
    constants: dict[str, float]
    errors: dict[str, float]  # standard errors; absent where a constant ended at 0

    def time_s(self, case: Case, roof_s: float | None = None) -> float:
        """Forward and backward; ``roof_s`` of all its products where that was measured."""
        if roof_s is None:
            roof_s = case.products * case.flop_of_a_product / self.rate
        time = roof_s + collectives(case, self.link, self.rate).exposed_s
        for (name, *_), column in zip(CONSTANTS, columns(case, self.link, self.rate), strict=True):
            time += self.constants[name] * column
        return time

    def ratio(self, case: Case) -> float:
        """Over the shard's own products: four in ``recompute``, else three."""
        return self.time_s(case) * self.rate / (case.products * case.flop_of_a_product)

    def on_adapters(self) -> Model:
        """The same where one adapter carries the ring."""
        step_s, bytes_per_s = NETWORK_STEP_S, ADAPTER_BYTES_PER_S
        slow = replace(self.link, step_s=step_s, bytes_per_s=bytes_per_s, source="assumed")
        return replace(self, link=slow)


def case_of(row: Row) -> Case | None:
    """The case of one row of the benchmark, None where the model is not of it."""
    wanted = ("T", "H", "V", "tp", "variant", "chunk_tokens", "time_ms", "roof_ms")
    if any(row.get(name) is None for name in wanted) or row.get("logits_backend") != "scaled_exp":
        return None
    strategy, _, merge = str(row["variant"]).partition("/")
    if strategy not in STRATEGIES or row.get("wgrad_accumulator", "main_grad") != "main_grad":
        return None
    return Case(
        num_tokens=int(row["T"]),
        hidden_size=int(row["H"]),
        num_rows=int(row["V"]),
        ranks=int(row["tp"]),
        sequence_parallel=bool(row.get("sp")),
        strategy=strategy,
        chunk_tokens=int(row["chunk_tokens"]),
        packed=merge != "all_reduce",
    )


def fit_rate(rows: Iterable[Row]) -> tuple[float, tuple[float, float]]:
    """FLOP/s of the roofs: the median, the least and the largest."""
    rates = []
    for row in rows:
        if row.get("variant") == "roof" and row.get("time_ms"):
            flop = 6.0 * row["T"] * row["H"] * row["V"]
            rates.append(flop / (row["time_ms"] * 1e-3))
    if not rates:
        raise UsageError("no row named 'roof', whose products tell the rate")
    return median(rates), (min(rates), max(rates))


def fit_link(rows: Iterable[Row], hidden_sizes: dict[str, int]) -> Link | None:
    """From the collectives of profiled steps; None where they have fewer than two sizes.

    Of each size the shortest of any rank and variant: the others wait for a rank that is late.
    """
    shortest: dict[tuple[int, int], float] = {}
    for row in rows:
        ranks, shape = row.get("tp", 1), row.get("shape")
        if "kernels" not in row or ranks < 2 or not row.get("sp") or shape not in hidden_sizes:
            continue
        for kind, _, count, total_ms in row["kernels"]:
            whole = row.get("variant") == "megatron-te"
            # Our gathers share launches with statistics and sampled rows.
            if kind != "reduce-scatter" and not (kind == "all-gather" and whole):
                continue
            num_bytes = 2 * row["T"] * hidden_sizes[shape] // (1 if whole else round(count))
            key = (ranks, num_bytes)
            seconds = total_ms * 1e-3 / count
            shortest[key] = min(shortest.get(key, math.inf), seconds)
    if len(shortest) < 2:
        return None
    # Relative errors count: each line is divided by its time.
    table, values = [], []
    for (ranks, num_bytes), seconds in shortest.items():
        table.append((1 / seconds, (ranks - 1) * num_bytes / ranks / seconds))
        values.append(1 - (ranks - 1) * NVLINK_STEP_S / seconds)
    (latency, inverse), _ = least_squares(np.array(table), np.array(values))
    if inverse <= 0:
        return None
    sizes = f"from {len(shortest)} sizes of collectives"
    return Link(float(latency), NVLINK_STEP_S, float(1 / inverse), sizes)


def least_squares(matrix: Any, values: Any) -> tuple[Any, Any]:
    """``(x, standard errors)`` of ``min |matrix @ x - values|`` with no ``x`` below 0.

    A column whose constant would be negative is left out, the most negative first: its 0 has the
    error NaN.
    """
    active = [i for i in range(matrix.shape[1]) if np.any(matrix[:, i] != 0)]
    x = np.zeros(matrix.shape[1])
    while active:
        # Columns differ by many powers of ten.
        scale = np.linalg.norm(matrix[:, active], axis=0)
        solved = np.linalg.lstsq(matrix[:, active] / scale, values, rcond=None)[0] / scale
        worst = int(np.argmin(solved * scale))
        if solved[worst] >= 0:
            x[active] = solved
            break
        active.pop(worst)
    errors = np.full(matrix.shape[1], np.nan)
    freedom = len(values) - len(active)
    if active and freedom > 0:
        scale = np.linalg.norm(matrix[:, active], axis=0)
        part = matrix[:, active] / scale
        variance = float(np.sum((matrix @ x - values) ** 2)) / freedom
        errors[active] = np.sqrt(variance * np.diag(np.linalg.pinv(part.T @ part))) / scale
    return x, errors


def fit(rows: Sequence[Row], link: Link | None = None) -> Model:
    """All constants from benchmark and profile rows, in any order."""
    rate, spread = fit_rate(rows)
    hidden_sizes = {row["shape"]: row["H"] for row in rows if "shape" in row and "H" in row}
    link = link or fit_link(rows, hidden_sizes) or ASSUMED
    table, values = [], []
    for row in rows:
        case = case_of(row)
        if case is None:
            continue
        roof_s, time_s = row["roof_ms"] * 1e-3, row["time_ms"] * 1e-3
        excess = time_s - roof_s - collectives(case, link, rate).exposed_s
        table.append([column / roof_s for column in columns(case, link, rate)])
        values.append(excess / roof_s)
    if not table:
        raise UsageError("no row of store, grad_in_forward or recompute with the scaled-exp GEMM")
    x, errors = least_squares(np.array(table), np.array(values))
    names = [name for name, *_ in CONSTANTS]
    known = {n: float(e) for n, e in zip(names, errors, strict=True) if not math.isnan(e)}
    return Model(rate, spread, link, dict(zip(names, (float(v) for v in x), strict=True)), known)


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return markdown(head, lines) + "\n"


def constants_table(model: Model) -> str:
    low, high = (f"{rate / 1e12:.0f}" for rate in model.rate_spread)
    lines = [["`P`", f"{model.rate / 1e12:.0f} ({low} to {high})", "TFLOP/s of the GEMMs"]]
    link = model.link
    lines.append(["`a`", f"{link.latency_s * 1e6:.1f}", f"us a collective ({link.source})"])
    lines.append(["`s`", f"{link.step_s * 1e6:.1f}", "us a step of a ring (NCCL's own model, not fitted)"])
    lines.append(["`b`", f"{link.bytes_per_s / 1e9:.0f}", "GB/s of a rank's link"])
    for name, letter, unit, scale in CONSTANTS:
        value = f"{model.constants[name] * scale:.3g}"
        if name in model.errors:
            value += f" ± {model.errors[name] * scale:.2g}"
        lines.append([f"`{letter}`", value, unit])
    return markdown_table(["", "fitted", "unit"], lines)


def residuals(model: Model, rows: Iterable[Row]) -> list[tuple[Row, Case, float, float]]:
    """(row, case, measured, modelled), both over the row's own roof."""
    found = []
    for row in rows:
        case = case_of(row)
        if case is not None:
            roof_s = row["roof_ms"] * 1e-3
            modelled = model.time_s(case, roof_s) / roof_s
            found.append((row, case, row["time_ms"] / row["roof_ms"], modelled))
    return found


def residual_table(found: Iterable[tuple[Row, Case, float, float]]) -> str:
    lines = []
    for row, case, measured, modelled in found:
        ranks = f"{case.ranks}{' SP' if case.sequence_parallel else ''}"
        words = [str(row.get("shape", "")), str(case.num_tokens), ranks, str(row["variant"])]
        words += [str(case.chunk_tokens), f"{measured:.3f}", f"{modelled:.3f}"]
        lines.append([*words, f"{measured - modelled:+.3f}"])
    head = ["shape", "T", "R", "variant", "C", "measured", "modelled", "difference"]
    return markdown_table(head, lines)


def peak_gib(case: Case, device: str) -> float:
    """Predicted, beside inputs, ``grad_hidden`` and ``main_grad``."""
    inputs = PlanInputs(
        num_tokens=case.num_tokens,
        hidden_size=case.hidden_size,
        num_rows=case.num_rows,
        num_parts=case.ranks if case.sequence_parallel else 1,
        tp_size=case.ranks,
        token_weights_known=True,
        device=device,
        strategy=case.strategy,
        chunk_tokens=case.chunk_tokens,
    )
    return plan(inputs).predicted_peak_bytes / 2**30


def carried_table(model: Model, head: tuple[int, int], device: str) -> str:
    """Ratio to the shard's roof on the fitted link and by adapters, and GiB, of each strategy."""
    hidden_size, vocab = head
    slow = model.on_adapters()
    lines = []
    for num_tokens in TOKENS:
        for count in RANKS:
            rows = -(-vocab // count)
            words = [str(num_tokens), str(count), str(rows)]
            for strategy in STRATEGIES:
                case = Case(num_tokens, hidden_size, rows, count, True, strategy, CHUNK_TOKENS)
                words.append(f"{model.ratio(case):.2f}")
                words.append(f"{slow.ratio(case):.2f}" if count > 1 else "")
                words.append(f"{peak_gib(case, device):.2f}")
            lines.append(words)
    names = [f"`{name}`{what}" for name in STRATEGIES for what in ("", ", adapter", ", GiB")]
    return markdown_table(["T", "R", "V", *names], lines)


def shortest_chunk(model: Model, head: tuple[int, int], ranks: int) -> float:
    """Tokens of a chunk whose latencies and accumulation take ``SHARE`` of its three products."""
    hidden_size, vocab = head
    rows = vocab / ranks
    each = model.constants["accumulation"] * 8.0 * rows * hidden_size + model.constants["chunk"]
    each += 3 * model.link.latencies_s(ranks)  # gather, statistics, reduce-scatter
    return each * model.rate / (6.0 * hidden_size * rows * SHARE)


def smallest_shard(model: Model, ranks: int) -> float:
    """Vocabulary rows of a rank whose product takes as long as the bytes of its hidden states."""
    return model.rate / model.link.bytes_per_s * (ranks - 1) / ranks


def limits_table(model: Model, head: tuple[int, int]) -> str:
    lines = []
    for count in RANKS:
        words = [str(count), str(-(-head[1] // count))]
        for one in (model, model.on_adapters()):
            words.append(f"{smallest_shard(one, count):.0f}")
            words.append(f"{shortest_chunk(one, head, count):.0f}")
        lines.append(words)
    names = ("V that hides the bytes", f"C at {100 * SHARE:g} %")
    return markdown_table(["R", "V", *names, *(f"{name}, adapter" for name in names)], lines)


def root_mean_square(found: Sequence[tuple[Row, Case, float, float]]) -> float:
    return math.sqrt(sum((measured - modelled) ** 2 for *_, measured, modelled in found) / len(found))


def largest(found: Sequence[tuple[Row, Case, float, float]]) -> float:
    return max(abs(measured - modelled) for *_, measured, modelled in found)


def tables(model: Model, rows: Sequence[Row], sources: Sequence[str]) -> str:
    """All, in Markdown; residuals of the rows over several ranks."""
    found = residuals(model, rows)
    device = next((str(row["device"]) for row in rows if row.get("device")), "")
    parts = {
        "one rank": [one for one in found if one[1].ranks == 1],
        "several": [one for one in found if one[1].ranks > 1],
    }
    fitted = ", ".join(
        f"{len(part)} rows of {name} (root mean square difference {root_mean_square(part):.3f} of the GEMM "
        f"time, largest {largest(part):.3f})"
        for name, part in parts.items()
        if part
    )
    adapter = f"{ADAPTER_BYTES_PER_S / 1e9:.0f} GB/s, {NETWORK_STEP_S * 1e6:.1f} us a step"
    lines = [
        f"Fitted to {fitted}, {device}. From " + ", ".join(f"`{name}`" for name in sources) + ".",
        "",
        constants_table(model),
        f"**Predicted**, with sequence parallelism and C = {CHUNK_TOKENS}: time over the shard's own "
        f"GEMMs on the fitted link; the same where one network adapter carries the ring ({adapter}; "
        "assumed); the peak.",
        "",
    ]
    for head in HEADS:
        lines += [f"H = {head[0]}, V = {head[1]} over all ranks:", ""]
        lines.append(carried_table(model, head, device))
    lines += [
        "**Where chunking stops paying**: the rows V that a shard must have for a GEMM to hide the "
        "communication of a chunk's hidden states, whatever C is; and the length C of a chunk whose "
        f"latencies and accumulation take {100 * SHARE:g} % of its three GEMMs.",
        "",
    ]
    for head in HEADS:
        lines += [f"H = {head[0]}, V = {head[1]} over all ranks:", ""]
        lines.append(limits_table(model, head))
    if parts["several"]:
        lines += ["**Row by row**, over the row's own GEMM time:", "", residual_table(parts["several"])]
    return "\n".join(lines).rstrip() + "\n"


def read(paths: Iterable[Path]) -> list[Row]:
    """Rows of all files."""
    return [row for path in paths for row in results.rows(path)]


def usable(path: Path) -> bool:
    """Whether the file has anything to fit."""
    if path.name >= FIRST_WITH_ONE_GEMM:
        return False
    content = read([path])
    return any(case_of(row) or ("kernels" in row and row.get("tp", 1) > 1) for row in content)


def parts() -> dict[str, str]:
    """What docs/scaling.md has of it, by the name of its markers."""
    files = sorted(filter(usable, RESULTS.glob("*.json")))
    rows = read(files)
    return {"scaling": tables(fit(rows), rows, [path.name for path in files])}
