"""The documentation: the site builds without a network and without a warning; flags in it exist."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_fused_ce.adapter.arguments import add_arguments
from megatron_fused_ce.estimate.answer import GIB
from megatron_fused_ce.estimate.command import plan_of

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "kernels" / "README.md", *sorted(DOCS.rglob("*.md"))]


def build(docs: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """What `make docs` does."""
    pytest.importorskip("sphinx", reason="sphinx is not installed")
    options = ("-W", "--keep-going", "-n", "-q", "-b", "html", "-d", str(site.parent / "doctrees"))
    command = [sys.executable, "-m", "sphinx", *options, str(docs), str(site)]
    return subprocess.run(command, capture_output=True, text=True)


class Loads(HTMLParser):
    """What a browser fetches to show a page: scripts, styles, fonts, images."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get("href") if tag == "link" else given.get("src")
        if address is not None:
            self.addresses.append(address)


def test_the_site_builds_strictly_and_needs_no_network(tmp_path):
    done = build(DOCS, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    pages = {page.relative_to(tmp_path / "site") for page in (tmp_path / "site").rglob("*.html")}
    assert {page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md")} <= pages
    for page in (tmp_path / "site").rglob("*.html"):
        outside = [address for address in Loads(page).addresses if "//" in address]
        assert not outside, f"{page.name} loads {outside}"
        assert ' download="' not in page.read_text(), f"a link of {page.name} downloads a file"
    assert 'id="will-it-help-me"' in (tmp_path / "site" / "index.html").read_text(), "README.md is the index"
    assert "def linear_cross_entropy" in re.sub(
        "<[^>]+>", "", (tmp_path / "site/files/megatron_fused_ce/op.py.html").read_text()
    )


#: Words of a page -> what the build must say.
DEFECTS = {
    "[page](no-such-page.md)": "target not found: 'no-such-page.md'",
    "[heading](index.md#no-such-heading)": "'no-such-heading'",
    "[own heading](#nowhere-here)": "target not found: 'nowhere-here'",
    "[file](benchmarks/results/none.json)": "target not found: 'benchmarks/results/none.json'",
    "![picture](images/no-such-picture.png)": "image file not readable",
}
#: The same of README.md, which is the index.
README_DEFECTS = {
    "[page](docs/gone.md)": "target not found: 'gone.md'",
    "[heading](docs/page.md#gone)": "'gone'",
    "[own heading](#gone-here)": "target not found: 'gone-here'",
    "[file](GONE.md)": "GONE.md",
    "![picture](docs/gone.png)": "image file not readable: gone.png",
}


def test_what_is_broken_ends_the_build(tmp_path):
    """By this site's settings, on four pages: each is one warning, and -W makes an error of every one."""
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copy(DOCS / "conf.py", docs)
    shutil.copytree(DOCS / "_static", docs / "_static")
    (tmp_path / "megatron_fused_ce").symlink_to(ROOT / "megatron_fused_ce")  # its version
    (docs / "index.md").write_text("<!-- README.md -->\n\n```{toctree}\npage\n```\n")
    readme = tmp_path / "README.md"
    readme.write_text("# Index\n\n[page](docs/page.md#page)\n")
    page = docs / "page.md"
    page.write_text("# Page\n\n[index](index.md#index)\n")
    assert build(docs, tmp_path / "site").returncode == 0
    page.write_text("# Page\n\n" + "\n\n".join(DEFECTS) + "\n")
    readme.write_text("# Index\n\n" + "\n\n".join(README_DEFECTS) + "\n")
    (docs / "forgotten.md").write_text("# In no navigation\n")
    done = build(docs, tmp_path / "broken")
    assert done.returncode != 0
    for message in (*DEFECTS.values(), *README_DEFECTS.values(), "forgotten.md"):
        assert message in done.stderr
    warnings = [line for line in done.stderr.splitlines() if "WARNING: " in line]
    assert len(warnings) == len(DEFECTS) + len(README_DEFECTS) + 1, done.stderr


def test_the_files_that_the_kernels_page_names_exist():
    named = re.findall(r"`([a-z][\w/]*\.py)`", (ROOT / "kernels" / "README.md").read_text())
    assert len(named) > 8
    for path in named:
        assert (ROOT / "kernels" / path).exists() or (ROOT / path).exists(), path


def test_flags_in_the_documentation_exist():
    parser = add_arguments(argparse.ArgumentParser())
    for page in PAGES:
        named = re.findall(r"--fused-(?:chunked-ce|ce)[a-z-]*\b", page.read_text())
        unknown = set(named) - set(parser._option_string_actions)
        assert not unknown, f"{page.relative_to(ROOT)}: {unknown}"


#: A measured figure: milliseconds, MiB, or a relative difference.
FIGURE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)(?= (?:ms|MiB)\b)|(?<![\w.])(\d\.\de-\d+)")


@pytest.mark.parametrize("page", sorted(DOCS.glob("migration/*.md")), ids=lambda page: page.stem)
def test_figures_of_the_migration_pages_are_measured_ones(page):
    """Each stands in the benchmarks' pages, which a page with figures links to."""
    measured = "".join(path.read_text() for path in DOCS.glob("benchmarks/**/*.md"))
    numbers = {float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", measured)}
    figures = {float(ms or difference) for ms, difference in FIGURE.findall(page.read_text())}
    assert figures <= numbers, figures - numbers
    assert len(figures) >= (0 if "bridge" in page.stem else 5), "the pattern finds them"


def test_the_arithmetic_of_scaling_is_what_the_page_prints():
    (program,), (printed,) = (
        re.findall(rf"```{language}\n(.*?)```", (DOCS / "scaling.md").read_text(), re.DOTALL)
        for language in ("python", "text")
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == printed


def test_the_lever_for_those_out_of_memory_is_the_plans():
    """docs/troubleshooting.md: the budget that it names, and `recompute` without one."""
    launch = ["--from-launch", str(ROOT / "scripts" / "examples" / "llama3_8b.sh")]

    def peak(*words):
        advice = plan_of([*launch, *words]).advice
        return (
            advice.recommended.peak / GIB,
            advice.baseline.peak / GIB,
            advice.recommended.head.relative_time,
        )

    (auto, stock, time), (low, _, slower), (recomputed, _, _) = (
        peak(*words) for words in ([], ["--fused-ce-memory-mb", "224"], ["--fused-ce-strategy", "recompute"])
    )
    said = f"predicted peak of {low:.1f} GiB instead of {auto:.1f} ({stock:.1f} without the flag), "
    said += f"for {slower / time:.2f} times the head's time"
    text = " ".join((DOCS / "troubleshooting.md").read_text().split())
    assert said in text and f"there gains {auto - recomputed:.2f} GiB" in text
    assert peak("--fused-ce-memory-mb", "112")[0] == low, "below which nothing is gained"
