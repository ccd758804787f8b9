"""The documentation site: ``make docs``. No network; every warning is an error there and in the tests."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import download_reference
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

project = "megatron_fused_ce"
version_line = re.search(
    r'^__version__ = "(.+)"$', (ROOT / project / "__init__.py").read_text(), re.MULTILINE
)
assert version_line is not None
version = release = version_line.group(1)

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
# Links to headings as GitHub makes them: `page.md#the-heading`.
myst_heading_anchors = 4

# Docstrings name types and modules that have no page; tests/test_house.py holds the names.
nitpick_ignore_regex = [("py:.*", ".*")]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_copy_source = False
highlight_language = "none"

#: A line of benchmarks/results/README.md that stands for the table of its files.
RESULTS_HERE = "<!-- results -->"


def table_of_results(folder: Path) -> str:
    """One row for each result file that has a page, the newest first."""
    rows = ["| file | device | torch | commit |", "|---|---|---|---|"]
    for page in sorted(folder.glob("2*.md"), reverse=True):
        made_by = json.loads(page.with_suffix(".json").read_text())["made_by"]
        facts = " | ".join(str(made_by.get(key) or "–") for key in ("device", "torch", "commit"))
        rows.append(f"| [{page.stem}]({page.name}) | {facts} |")
    return "\n".join(rows)


def edit_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put a table of the results into their page, which alone leads to them; mark links out of docs as paths.

    Title a page of results by its file: scripts write them, some without a heading, some with the same.
    MyST takes every link to Markdown for one to a page.
    """
    to_repository = "../" * (docname.count("/") + 1)
    source[0] = source[0].replace(f"]({to_repository}", f"](path:{to_repository}")
    if RESULTS_HERE in source[0]:
        source[0] = source[0].replace(RESULTS_HERE, table_of_results(Path(app.srcdir, docname).parent))
    if docname.startswith("benchmarks/results/2"):
        name = docname.rsplit("/", 1)[1]
        source[0] = f"---\norphan: true\n---\n\n# {name}\n\n" + re.sub(r"\A# ", "## ", source[0])


def leave_out_links_to_files(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Keep the words of a link to a file of the repository, which is no page; lead to pictures themselves.

    Sphinx would have the browser download the files.
    """
    for link in list(doctree.findall(download_reference)):
        if "filename" not in link:
            continue  # the file does not exist, which the build reports
        if link["reftarget"].endswith(".png"):
            to_root = app.builder.get_relative_uri(docname, "index").removesuffix("index.html")
            uri = f"{to_root}_downloads/{link['filename']}"
            link.replace_self(nodes.reference("", "", *link.children, refuri=uri, internal=True))
        else:
            link.replace_self(link.children)


def setup(app: Sphinx) -> None:
    app.connect("source-read", edit_source)
    app.connect("doctree-resolved", leave_out_links_to_files)
