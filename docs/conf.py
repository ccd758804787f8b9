"""The documentation site: ``make docs``. No network; every warning is an error there and in the tests."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent

project = "megatron_fused_ce"
version_line = re.search(
    r'^__version__ = "(.+)"$', (ROOT / project / "__init__.py").read_text(), re.MULTILINE
)
assert version_line is not None
version = release = version_line.group(1)

extensions = ["myst_parser"]
root_doc = "index"
# Links to headings as GitHub makes them: `page.md#the-heading`.
myst_heading_anchors = 4

html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_copy_source = False
highlight_language = "none"


def name_results(app: Sphinx, docname: str, source: list[str]) -> None:
    """Title a page of results by its file: scripts write them, some without a heading, some with the same."""
    if docname.startswith("benchmarks/results/2"):
        name = docname.rsplit("/", 1)[1]
        source[0] = f"# {name}\n\n" + re.sub(r"\A# ", "## ", source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", name_results)
