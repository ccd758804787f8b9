"""Writes the figures of README.md from committed results, each part between two comments.

    python scripts/readme_figures.py            # make figures
    python scripts/readme_figures.py --check    # writes nothing; exit code 1 where README.md is out of date

Exit code 2: a result file, a row of it or a pair of comments that is missing. Needs no torch and no device.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import committed_results
import marked_document

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "benchmarks" / "results"
NAME = "scripts/readme_figures.py"
Row = dict[str, Any]


class Results:
    """The rows of one file."""

    def __init__(self, name: str) -> None:
        self.path = RESULTS / f"{name}.json"
        try:
            self.rows: list[Row] = committed_results.load(self.path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path.name} cannot be read: {error}") from None

    def row(self, **wanted: Any) -> Row:
        """The one row with these values."""
        found = [row for row in self.rows if wanted.items() <= row.items()]
        if len(found) != 1:
            raise ValueError(f"{self.path.name} has {len(found)} rows with {wanted}, expected one")
        return found[0]

    def trains(self, **wanted: Any) -> Row:
        row = self.row(**wanted)
        if row["status"] != "ok":
            raise ValueError(f"{self.path.name}: {wanted} ended with {row['status']}")
        return row

    def runs_out(self, **wanted: Any) -> int:
        """T of a launch that does not fit."""
        row = self.row(**wanted)
        if row["status"] != "out of memory":
            raise ValueError(f"{self.path.name}: {wanted} ended with {row['status']}")
        return int(row["T"])


def speed(row: Row) -> str:
    return f"{row['tokens_per_s']:.0f}"


def peak(row: Row) -> str:
    return f"{row['peak_mib']:.0f}"


def head_table(results: Results, cell: Row, lines: Sequence[tuple[str, Sequence[Row]]]) -> str:
    """Time over three products, and peak. A line of several variants has several figures.

    ``{own}`` in a label is the ratio to the variant's own products.
    """
    products_ms = results.row(variant="roof", **cell)["time_ms"]
    text = "| | time | peak MiB |\n|---|---:|---:|\n"
    for label, wanted in lines:
        rows = [results.row(**cell, **variant) for variant in wanted]
        times = ", ".join(f"{row['time_ms'] / products_ms:.3f}" for row in rows)
        peaks = ", ".join(map(peak, rows))
        text += f"| {label.format(own=format(rows[0]['ratio'], '.3f'))} | {times} | {peaks} |\n"
    return text


def variants(*names: str) -> list[Row]:
    return [{"variant": name} for name in names]


def one_gpu() -> str:
    return head_table(
        Results("2026-11-21-h200-reach-llama3-8b"),
        {"T": 32768},
        [
            ("`grad_in_forward`, what `auto` takes here", variants("grad_in_forward")),
            ("`store`", variants("store")),
            ("`recompute` ({own} of four products)", variants("recompute")),
            ("Megatron unfused", variants("megatron-unfused")),
            ("Megatron `--cross-entropy-fusion-impl native`", variants("megatron-native")),
            (
                "Megatron's layer + Transformer Engine's cross entropy, with `overwrite_input`",
                variants("megatron-te", "megatron-te-overwrite"),
            ),
            ("`torch.compile` of linear + cross entropy", variants("torch-compile")),
            ("Liger Triton, chunks of 4096 tokens or more", variants("liger-large-chunks")),
            ("Liger, cuBLAS and CuTe rows", variants("liger-cutedsl-ce")),
            ("QuACK, with scaled exponentials", variants("quack", "quack-scaled-exp")),
            ("Cut Cross Entropy", variants("cce")),
        ],
    )


def four_gpus() -> str:
    chunks = {"chunk_tokens": 8192}
    return head_table(
        Results("2026-11-21-h200-tp4-reach"),
        {"T": 32768, "sp": True},
        [
            ("`store`, chunks of 8192 tokens", [{"variant": "store", **chunks}]),
            (
                "`grad_in_forward`, chunks of 8192, with two all-reduces",
                [
                    {"variant": "grad_in_forward", **chunks},
                    {"variant": "grad_in_forward/all_reduce", **chunks},
                ],
            ),
            (
                "`recompute`, chunks of 8192 ({own} of four products)",
                [{"variant": "recompute", **chunks}],
            ),
            (
                "Megatron's layer + Transformer Engine's cross entropy, with `overwrite_input`",
                variants("megatron-te", "megatron-te-overwrite"),
            ),
            ("Megatron unfused", variants("megatron-unfused")),
            ("verl's linear cross entropy", variants("verl-tp")),
        ],
    )


def one_gpu_launches() -> str:
    results = Results("2026-11-21-h200-longest-sequence")
    flag, native = (results.trains(T=16384, variant=name) for name in ("auto", "native"))
    longest = results.trains(T=131072, variant="auto")
    for name in ("unfused", "native"):
        results.runs_out(T=longest["T"], variant=name)
    lines = (
        "A whole run of `pretrain_gpt.py` on one H200 (a Llama-3.2-1B-like model, Transformer Engine's",
        f"layers): at {flag['T']} tokens {speed(flag)} tokens/s in {peak(flag)} MiB, where",
        f"native has {speed(native)} in {peak(native)}; at {longest['T']} tokens it trains in",
        f"{peak(longest)} MiB, where unfused and native run out of memory.",
    )
    return "\n".join(lines) + "\n"


def four_gpus_launches() -> str:
    steps = Results("2026-11-21-h200-tp4-pretrain-steps")
    reach = Results("2026-11-21-h200-tp4-pretrain-reach")
    flag, native, unfused = (
        steps.trains(T=32768, variant=name) for name in ("auto", "native", "unfused")
    )
    longest = reach.trains(T=1572864, variant="auto")
    too_long = reach.runs_out(T=786432, variant="unfused")
    lines = (
        f"`pretrain_gpt.py` on them (two layers of Llama-3-8B, {flag['T']} tokens): {flag['time_ms']} ms a",
        f"step in {peak(flag)} MiB with the flag, native {native['time_ms']} in {peak(native)}, unfused",
        f"{unfused['time_ms']} in {peak(unfused)}. One layer of Llama-3.2-1B trains on {longest['T']}",
        f"tokens with the flag, where unfused runs out of memory at {too_long}.",
    )
    return "\n".join(lines) + "\n"


PARTS: dict[str, Callable[[], str]] = {
    "the head on one GPU": one_gpu,
    "launches on one GPU": one_gpu_launches,
    "the head on four GPUs": four_gpus,
    "launches on four GPUs": four_gpus_launches,
}


def parts() -> dict[str, str]:
    """Text of every part, by the name in its comments."""
    return {f"{NAME}, {name}": make() for name, make in PARTS.items()}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", metavar="FILE.md")
    parser.add_argument(
        "--check", action="store_true", help="write nothing, say what is out of date"
    )
    given = parser.parse_args(words)
    try:
        made = parts()
        if not given.check:
            marked_document.rewrite(given.readme, made)
            return 0
        text = given.readme.read_text()
        stale = [
            name
            for name, part in made.items()
            if marked_document.with_part(text, name, part) != text
        ]
    except (OSError, ValueError) as error:
        parser.exit(2, f"readme_figures: {error}\n")
    for name in stale:
        print(f"{given.readme}: {name.partition(', ')[2]}: out of date; run make figures")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
