"""Peaks that NVIDIA's CI measured on H100s, with the launch of each: ``tests/plan/megatron_records.tsv``.

    python -m megatron_fused_ce.scripts.dev.megatron_records CHECKOUT...

writes it anew from checkouts of Megatron-LM (and needs PyYAML). A record is the largest
``mem-max-allocated-bytes`` of a functional test's ``golden_values*h100*.json``, which Megatron takes from the
last rank. Those are taken that

- are a fresh pretraining of a GPT or a hybrid: a recipe for H100s starts ``pretrain_gpt.py``,
  ``pretrain_mamba.py`` or ``pretrain_hybrid.py``, and the test's type is ``regular`` (no resumed run);
- are not a second run's (``_2nd``).
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fused_ce.scripts.lib.launches import full_version
from megatron_fused_ce.scripts.lib.results import REPOSITORY

LIST = REPOSITORY / "tests" / "plan" / "megatron_records.tsv"
PROGRAMS = ("pretrain_gpt.py", "pretrain_mamba.py", "pretrain_hybrid.py")
#: Kinds of tests that pretrain; among them are some of inference and of RL.
KINDS = ("gpt", "gpt-nemo", "hybrid", "mixtral", "moe")
#: Rows of the vocabulary where a test names files alone, by a part of the file's name.
VOCABULARIES = {"vocab.json": 50257, "nemotron_2_256k": 256000, "tokenizer.model": 32000}


@dataclass(frozen=True)
class Case:
    """One functional test."""

    #: kind/name
    path: str
    #: ``regular``, ``ckpt-resume`` ...
    kind: str
    #: empty where no recipe for H100s starts it
    program: str
    gpus: int
    words: tuple[str, ...]
    #: MiB by the file's name
    peaks: dict[str, float]

    @property
    def launch(self) -> str:
        start = f"torchrun --nproc-per-node {self.gpus} {self.program}" if self.program else "pretrain_gpt.py"
        words = shlex.join(self.words)
        # A regular test's --load names a folder that is empty still.
        return f"{start} {re.sub('--load [^ ]+', '', words) if self.kind == 'regular' else words}"

    @property
    def pretrains(self) -> bool:
        elsewhere = self.program and not self.program.endswith(PROGRAMS)
        other = "inference" in self.path or "grpo" in self.path
        return self.path.split("/")[0] in KINDS and not (elsewhere or other)

    @property
    def is_record(self) -> bool:
        return bool(self.program.endswith(PROGRAMS) and self.kind == "regular" and self.peaks)


def version(checkout: Path) -> str:
    """As in ``0.19``."""
    return full_version(checkout).rpartition(".")[0]


def cases(checkout: Path) -> Iterator[Case]:
    """All functional tests of a checkout."""
    import yaml  # type: ignore[import-untyped]

    started = _recipes(checkout)
    for config in sorted((checkout / "tests/functional_tests/test_cases").glob("*/*/model_config.yaml")):
        said = yaml.safe_load(config.read_text())
        kind, name = config.parts[-3:-1]
        program, gpus = started.get((kind, name), ("", 8))
        words = [word for item in (said.get("MODEL_ARGS") or {}).items() for word in _words(*item)]
        peaks = {file.name: peak for file in config.parent.glob("golden_values*h100*.json")
                 if "_2nd" not in file.name and (peak := _peak(file))}  # fmt: skip
        words = _with_vocabulary(words, version(checkout))
        yield Case(f"{kind}/{name}", str(said.get("TEST_TYPE")), program, gpus, tuple(words), peaks)


def _recipes(checkout: Path) -> dict[tuple[str, str], tuple[str, int]]:
    """Program and GPUs of each test that a recipe for H100s starts."""
    import yaml

    found = {}
    for file in (checkout / "tests" / "test_utils" / "recipes" / "h100").glob("*.yaml"):
        recipe = yaml.safe_load(file.read_text())
        spec = recipe.get("spec", {})
        if program := re.search(r'TRAINING_SCRIPT_PATH=([\w/.]+)"', str(spec.get("script"))):
            for product in recipe["products"]:
                for name in product["test_case"]:
                    found[spec["model"], name] = program[1], spec["gpus"] * spec["nodes"]
    return found


def _words(name: str, value: Any) -> list[str]:
    """As the CI's script gives an argument (its ``_run_training.sh``)."""
    if value is True or value in ("", None):
        return [name]
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value).strip().replace("\\", "")
    return [name, *text[1:-1].split()] if text.startswith("[") else [name, text]


def _with_vocabulary(words: list[str], version: str) -> list[str]:
    if "--vocab-size" not in words:
        sizes = [size for part, size in VOCABULARIES.items() if any(part in word for word in words)]
        return [*words, "--vocab-size", str(sizes[0])] if sizes else words
    if "NullTokenizer" in words and int(version.split(".")[1]) < 18:  # it adds its end of document
        place = words.index("--vocab-size") + 1
        return [*words[:place], str(int(words[place]) + 1), *words[place + 1 :]]
    return words


def _peak(file: Path) -> float | None:
    """Largest peak, MiB; None where the file has none, or is empty."""
    try:
        values = json.loads(file.read_text())["mem-max-allocated-bytes"]["values"].values()
    except (json.JSONDecodeError, KeyError, TypeError):
        return None
    return max(float(value) for value in values if value != "nan") / 2**20


def records(text: str) -> Iterator[tuple[str, Case]]:
    """Versions and case of each line of the list; its only peak is that of the line."""
    for line in text.splitlines():
        if not line.startswith("#"):
            versions, path, file, peak, program, gpus, words = line.split("\t")
            peaks = {file: float(peak)}
            yield versions, Case(path, "regular", program, int(gpus), tuple(shlex.split(words)), peaks)


def main(checkouts: list[str]) -> int:
    rows: dict[str, list[str]] = {}
    for checkout in map(Path, checkouts):
        for case in filter(lambda case: case.is_record, cases(checkout)):
            for file, peak in case.peaks.items():
                row = (case.path, file, f"{peak:.1f}", case.program, str(case.gpus), shlex.join(case.words))
                rows.setdefault("\t".join(row), []).append(version(checkout))
    head = "# Written by scripts/dev/megatron_records.py: Megatron's versions; test, file; MiB of the last"
    lines = sorted("\t".join((" ".join(versions), row)) for row, versions in rows.items())
    LIST.write_text("\n".join([f"{head} rank, program, GPUs, words", *lines]) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
