"""README and documentation: links resolve, marked figures are the results', snippets run as printed."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_fused_ce
from megatron_fused_ce.adapter.arguments import add_arguments
from megatron_fused_ce.plan import command as estimate
from megatron_fused_ce.scripts.dev import figures
from megatron_fused_ce.scripts.lib import pages, results

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("[ks]*/README.md"), *sorted(DOCS.rglob("*.md"))]


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def test_links_to_files_resolve_and_flags_exist():
    links, flags = 0, add_arguments(argparse.ArgumentParser())._option_string_actions
    for page in PAGES:
        text = page.read_text()
        for link in re.findall(r"\]\(([^)#\s]+)", text):
            if not re.match(r"\w+:", link):
                assert (page.parent / link).exists(), f"{page.relative_to(ROOT)}: {link}"
                links += 1
        unknown = set(re.findall(r"--fused-(?:chunked-ce|ce)[a-z-]*\b", text)) - flags.keys()
        assert not unknown or page.name == "CHANGELOG.md", unknown  # that tells of those that are gone
    assert links > 200, "the pattern finds them"


#: What a browser fetches to show a page (scripts, styles, fonts, images) from elsewhere.
FETCHED = re.compile(r'<link [^>]*href="[^"]*//[^>]*>|<\w+ [^>]*src="[^"]*//[^>]*>')


def test_the_site_builds_strictly_and_needs_no_network(tmp_path):
    """As `make docs` does: a heading or page that a link misses is a warning, and ends it."""
    pytest.importorskip("sphinx", reason="sphinx is not installed")
    from megatron_fused_ce import losses, rl

    site = tmp_path / "site"
    options = ("-W", "--keep-going", "-n", "-q", "-b", "html", "-d", str(tmp_path / "doctrees"))
    run(tmp_path, "-m", "sphinx", *options, str(DOCS), str(site))
    pages = {page.relative_to(site) for page in site.rglob("*.html")}
    assert {page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md")} <= pages
    index = (site / "genindex.html").read_text()
    public = {*megatron_fused_ce.__all__, *losses.__all__, *rl.__all__} - {"losses", "rl"}  # modules
    assert [name for name in public if f'"{name}' not in index and f".{name}" not in index] == []
    for page in site.rglob("*.html"):
        assert not FETCHED.findall(page.read_text()), page.name
        assert ' download="' not in page.read_text(), f"a link of {page.name} downloads a file"


@pytest.mark.parametrize(("page", "ranks", "check"), [
    ("distillation.md", 2, "assert mine.grad.any() and rows.grad.any()"),
    ("losses.md", 1, ""), ("losses.md", 2, ""),
])  # fmt: skip
def test_a_snippet_over_ranks_runs_and_says_what_is_printed(tmp_path, page, ranks, check):
    (program,) = (each for each in blocks(DOCS / page, "python") if "init_process_group" in each)
    leave = "from megatron_fused_ce.scripts.lib import gloo; gloo.leave()"  # which says why
    (tmp_path / "page.py").write_text(f"{program}{check}\n{leave}")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = run(tmp_path, *launcher, "page.py")
    assert check or [done.stdout.replace(f" {ranks} rank", " 1 rank")] == blocks(DOCS / page, "text")


def test_every_python_block_of_the_pages_runs(tmp_path):
    """Each alone, without what the others made; those that need ranks are run above. What is not to be run is
    marked as text."""
    program = ["import runpy"]
    for page in PAGES:
        for block in blocks(page, "py(?:thon)?"):
            if "dist.init_process_group" not in block:
                path = tmp_path / f"{page.parent.name}_{page.stem}_{len(program)}.py"
                path.write_text(block)
                program.append(f"runpy.run_path({str(path)!r})")
    (tmp_path / "all.py").write_text("\n".join(program))
    run(tmp_path, "all.py")
    assert len(program) > 10, "the pattern finds them"


def is_in(figure, link):
    """Whether a result has the number to these digits: as such, in GiB of MiB, in per cent; or a page."""
    page = ROOT / link
    if not page.with_suffix(".json").exists():
        return page.suffix == ".md" and figure in page.read_text()
    mantissa, _, power = figure.replace(",", "").partition("e")
    within = 0.5001 * 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]))
    known: list[float] = []  # as json reads them: of strings none
    json.loads(page.with_suffix(".json").read_text(), parse_int=known.append, parse_float=known.append)
    value = float(figure.replace(",", ""))
    return any(
        abs(made - value) <= within for x in map(abs, map(float, known)) for made in (x, x / 1024, 100 * x)
    )


def test_a_measured_figure_of_the_readme_is_that_of_the_source_beside_it():
    """A link to measurements, or the word for what was not run."""
    text = re.sub(r"```.*?```", "", README.read_text(), flags=re.DOTALL)
    unit = r" (?:ms|GiB|MiB|%|nats|tokens/s|MHz)(?!\w)"
    measured = re.compile(rf"\d\]?{unit}|\d\.\d+\]? (?:to \d\.\d+ )?of|\de-\d|\dx?× ")
    figures_in = re.compile(rf"(?<![\w.])(?:\d[\d,]*(?=\]?{unit})|\d+\.\d+(?:e-\d+)?)(?![\w.])")
    num_figures, num_claims, wrong = 0, 0, []
    for claim in re.split(r"\n\n|\n(?=[-|] ?)", text):
        words = re.sub(r"\]\(.*?\)", "]", claim)
        if not measured.search(words) or re.search("[Pp]redicted", claim):
            continue
        links = re.findall(r"\]\((docs/(?:benchmarks/|images/|scaling\.md)[^)#]*)", claim)
        found = figures_in.findall(words)
        num_claims, num_figures = num_claims + 1, num_figures + len(found)
        wrong += [(claim, figure) for figure in found if not any(is_in(figure, link) for link in links)]
        wrong += [] if links else [(claim, "no source")]
    assert num_figures >= 8 and num_claims >= 5, "the patterns find them"
    assert wrong == []


def test_a_time_and_a_memory_are_a_row_of_the_results_linked_before_them():
    rows, pairs = [], 0
    for line in (DOCS / "coming-from.md").read_text().splitlines():
        for link in re.findall(r"\]\((\S*results/\S+)\.md\)", line):
            rows = results.rows(DOCS / f"{link}.json")
        known = [f"{row['time_ms'] or 0:.1f} {row['peak_mib'] or 0:.0f}" for row in rows]
        for time_ms, mib in re.findall(r"([\d.]+) ms(?: a step)?, (\d+) MiB", line):
            assert f"{time_ms} {mib}" in known, f"{time_ms} ms, {mib} MiB"
            pairs += 1
    assert pairs >= 9, "the patterns find them"


def test_troubleshooting_has_what_plan_predicts(capsys):
    page = " ".join((DOCS / "troubleshooting.md").read_text().split())
    launch = ["--from-launch", str(ROOT / "scripts/examples/llama3_8b.sh")]
    words = r"budget of (\d+) MiB it predicts a peak of ([\d.]+) .*?([\d.]+) with .*?([\d.]+) without"
    budget, with_budget, alone, without = re.search(words, page).groups()
    (recompute,) = re.findall(r"the predicted peak is ([\d.]+) GiB", page)
    of_memory, of_strategy = ["--fused-ce-memory-mb", budget], ["--fused-ce-strategy", "recompute"]
    for peak, more in ((alone, []), (with_budget, of_memory), (recompute, of_strategy)):
        estimate.main([*launch, *more])
        out = " ".join(capsys.readouterr().out.split())
        assert f"peak {peak}" in out and f", {without} without" in out


def test_every_marked_figure_is_the_results_and_another_is_told_and_put_right(tmp_path, capsys, monkeypatch):
    """Of README.md and docs, and README's picture; refresh with: make figures."""
    assert figures.main(["--check"]) == 0, capsys.readouterr()
    page, path = DOCS / "comparison.md", tmp_path / "comparison.md"
    text = page.read_text()
    monkeypatch.setattr(figures, "PAGES", {path: figures.PAGES[page]})
    path.write_text(wrong := re.sub(r"(ce`\*\* \| )1\.03 \|", r"\g<1>1.02 |", text))
    assert figures.main(["--check"]) == 1 and path.read_text() == wrong != text, "--check writes nothing"
    assert "speed and memory: out of date" in capsys.readouterr().out
    pages.rewrite(path, {name: make() for name, make in figures.PAGES[path].items()})
    assert path.read_text() == text
    path.write_text(text.replace("memory: begin", "memory: x"))
    assert figures.main(["--check"]) == 2 and str(path) in capsys.readouterr().err


def test_pages_are_short_and_the_readme_fits_a_narrow_window():
    """Docs but for benchmarks, which are records. Numbers: outside code, comments and links' targets."""
    pages = [README, *DOCS.glob("*.md"), *(DOCS / "rl").glob("*.md")]
    assert sum(len(page.read_text().split()) for page in pages) <= 29_500
    text = README.read_text()
    code = blocks(README, r"\w*")
    prose = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    numbers = re.findall(r"\d+(?:[.,]\d+)*", re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose))
    assert len(text.split()) <= 650 and len(numbers) <= 70 and len(text.splitlines()) <= 130
    assert len(code) >= 7 and max(len(line) for block in code for line in block.splitlines()) <= 80
    assert max(line.count("|") for line in prose.splitlines()) - 1 <= 5, "columns of a table"
    assert text.splitlines().index(re.search(r"^!\[.*$", text, re.MULTILINE).group()) < 10
