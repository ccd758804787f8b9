"""README.md's figures are those of the committed results; the command that writes them says what it lacks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fused_ce.planner import plan
from megatron_fused_ce.scripts.dev import figures, figures_plan
from megatron_fused_ce.scripts.dev import figures_readme as readme_figures

ROOT = Path(__file__).resolve().parents[2]

README = (ROOT / "README.md").read_text()


def test_every_page_is_up_to_date(capsys):
    """README.md, docs/plan.md and docs/upstream_tests.md; refresh with: make figures."""
    assert figures.main(["--check"]) == 0, capsys.readouterr()


def test_a_figure_that_is_not_the_results_is_told_and_put_right(tmp_path, capsys):
    path = tmp_path / "README.md"
    path.write_text(
        README.replace(
            "this, `--fused-chunked-ce`** | 157 |", "this, `--fused-chunked-ce`** | 156 |"
        ).replace("→ 43.2 ·", "→ 42.2 ·")
    )
    assert figures.main(["--check", "--readme", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [re.findall(r": (.*): out of date", line) for line in lines] == [
        ["speed and memory"],
        ["plans"],
    ]
    assert "`--fused-chunked-ce`** | 156 |" in path.read_text(), "--check writes nothing"
    assert figures.main(["--readme", str(path)]) == 0
    assert path.read_text() == README


def with_results(tmp_path, monkeypatch, name, change):
    """Committed results, of which one file is changed."""
    for source in readme_figures.RESULTS.glob("*.json"):
        (tmp_path / source.name).symlink_to(source)
    path = tmp_path / f"2026-11-21-h200-{name}.json"
    content = json.loads(path.read_text())
    path.unlink()
    path.write_text(json.dumps(content | {"rows": change(content["rows"])}))
    monkeypatch.setattr(readme_figures, "RESULTS", tmp_path)


def slower(rows):
    return [row | {"time_ms": 2 * row["time_ms"]} for row in rows]


def test_figures_come_from_the_results(tmp_path, monkeypatch):
    table = readme_figures.speed_and_memory()
    assert "| **this, `--fused-chunked-ce`** | 157 | 4.0 | 42 | 1.8 |" in table
    with_results(tmp_path, monkeypatch, "reach-llama3-8b", slower)
    assert "| **this, `--fused-chunked-ce`** | 313 | 4.0 | 42 | 1.8 |" in readme_figures.speed_and_memory()


def test_what_the_flag_takes_is_the_planners_choice(monkeypatch):
    """Not a strategy that is named in the script."""
    monkeypatch.setattr(readme_figures, "plan", lambda inputs: plan(replace(inputs, strategy="recompute")))
    assert "| 204 | 2.0 | 54 | 0.8 |" in readme_figures.speed_and_memory()


def test_the_plans_save_what_the_page_says():
    """A lot, some, little and nothing: the honest filter."""
    cells = re.findall(r"(\(?)[\d.]+\)? → (\(?)[\d.]+\)? · (\d+)% \|", figures_plan.help_table())
    assert len(cells) == len(figures_plan.HELP) * len(figures_plan.LENGTHS)
    saved = [int(part) for _, _, part in cells]
    assert max(saved) > 60 and saved.count(0) >= 3
    # Fits without it, fits only with it, fits with neither.
    assert {(before, after) for before, after, _ in cells} == {("", ""), ("(", ""), ("(", "(")}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "reach-llama3-8b",
            lambda rows: [row for row in rows if row["variant"] != "megatron-te"],
            "0 rows with",
        ),
        ("tp4-reach", lambda rows: rows + rows, "2 rows with"),
    ],
)
def test_results_that_do_not_say_it_are_one_line_and_status_2(
    tmp_path, monkeypatch, capsys, name, change, words
):
    with_results(tmp_path, monkeypatch, name, change)
    path = tmp_path / "README.md"
    path.write_text(README)
    status = figures.main(["--readme", str(path)])
    said = capsys.readouterr().err
    assert status == 2 and words in said and len(said.splitlines()) == 1
    assert path.read_text() == README


#: The end of a part before its begin.
EXCHANGED = README.replace("plans: begin", "plans: x").replace("plans: end", "plans: begin")
EXCHANGED = EXCHANGED.replace("plans: x", "plans: end")


@pytest.mark.parametrize("options", [[], ["--check"]])
@pytest.mark.parametrize("text", [None, "no comments", README + README, EXCHANGED])
def test_a_readme_without_its_comments_is_one_line_and_status_2(tmp_path, capsys, text, options):
    path = tmp_path / "README.md"
    if text is not None:
        path.write_text(text)
    status = figures.main([*options, "--readme", str(path)])
    said = capsys.readouterr().err
    assert status == 2 and len(said.splitlines()) == 1 and str(path) in said
    assert text is None or path.read_text() == text
    assert [file.name for file in tmp_path.iterdir()] == ([] if text is None else ["README.md"])
