"""README.md's figures are those of the committed results; the command that writes them says what it lacks."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import readme_figures  # noqa: E402

README = (ROOT / "README.md").read_text()


def test_the_readme_is_up_to_date(capsys):
    """Refresh with: make figures."""
    assert readme_figures.main(["--check"]) == 0, capsys.readouterr().out


def test_a_figure_that_is_not_the_results_is_told_and_put_right(tmp_path, capsys):
    path = tmp_path / "README.md"
    path.write_text(README.replace("| 4137 |", "| 4138 |").replace("131.2 ms", "130.2 ms"))
    assert readme_figures.main(["--check", "--readme", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [re.findall(r": (.*): out of date", line) for line in lines] == [
        ["the head on one GPU"],
        ["launches on four GPUs"],
    ]
    assert "4138" in path.read_text(), "--check writes nothing"
    assert readme_figures.main(["--readme", str(path)]) == 0
    assert path.read_text() == README


def with_results(tmp_path, monkeypatch, name, change):
    """Committed results, of which one file is changed."""
    for source in readme_figures.RESULTS.glob("*.json"):
        (tmp_path / source.name).symlink_to(source)
    path = tmp_path / f"2026-11-21-h200-{name}.json"
    rows = change(json.loads(path.read_text()))
    path.unlink()
    path.write_text(json.dumps(rows))
    monkeypatch.setattr(readme_figures, "RESULTS", tmp_path)


def slower(rows):
    """The roof's time doubled: every ratio is halved."""
    return [
        row | {"time_ms": 2 * row["time_ms"]} if row["variant"] == "roof" else row for row in rows
    ]


def test_figures_come_from_the_results(tmp_path, monkeypatch):
    with_results(tmp_path, monkeypatch, "reach-llama3-8b", slower)
    table = readme_figures.one_gpu()
    assert "| `store` | 0.508 | 8337 |" in table and "| `store` | 1.016 | 8337 |" in README


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("reach-llama3-8b", lambda rows: rows[:-1], "0 rows with {'T': 32768, 'variant': 'cce'}"),
        ("tp4-reach", lambda rows: rows + rows, "2 rows with"),
        (
            "longest-sequence",
            lambda rows: [row | {"status": "ok"} for row in rows],
            "'variant': 'unfused'} ended with ok",
        ),
        (
            "tp4-pretrain-steps",
            lambda rows: [row | {"status": "out of memory"} for row in rows],
            "ended with out of memory",
        ),
    ],
)
def test_results_that_do_not_say_it_are_one_line_and_status_2(
    tmp_path, monkeypatch, capsys, name, change, words
):
    with_results(tmp_path, monkeypatch, name, change)
    path = tmp_path / "README.md"
    path.write_text(README)
    with pytest.raises(SystemExit) as end:
        readme_figures.main(["--readme", str(path)])
    said = capsys.readouterr().err
    assert end.value.code == 2 and words in said and len(said.splitlines()) == 1
    assert path.read_text() == README


@pytest.mark.parametrize("options", [[], ["--check"]])
@pytest.mark.parametrize("text", [None, "no comments", README + README])
def test_a_readme_without_its_comments_is_one_line_and_status_2(tmp_path, capsys, text, options):
    path = tmp_path / "README.md"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as end:
        readme_figures.main([*options, "--readme", str(path)])
    said = capsys.readouterr().err
    assert end.value.code == 2 and len(said.splitlines()) == 1
    assert [file.name for file in tmp_path.iterdir()] == ([] if text is None else ["README.md"])
