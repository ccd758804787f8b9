"""The documentation site: ``make docs``. No network; every warning is an error there and in the tests."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import download_reference
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

#: A line of index.md that stands for README.md.
README_HERE = "<!-- README.md -->"
#: A line of benchmarks/results/README.md that stands for the table of its files.
RESULTS_HERE = "<!-- results -->"
#: Suffix of a file -> how it is highlighted; files of results are too long for that.
LANGUAGES = {".py": "python", ".sh": "bash"}


def table_of_results(folder: Path) -> str:
    """One row for each result file that has a page, the newest first."""
    rows = ["| file | device | torch | commit |", "|---|---|---|---|"]
    for page in sorted(folder.glob("2*.md"), reverse=True):
        made_by = json.loads(page.with_suffix(".json").read_text())["made_by"]
        facts = " | ".join(str(made_by.get(key) or "–") for key in ("device", "torch", "commit"))
        rows.append(f"| [{page.stem}]({page.name}) | {facts} |")
    return "\n".join(rows)


def edit_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put README.md into the index, and a table of the results into their page, which alone leads to them.

    Title a page of results by its file; mark links out of docs as paths.

    README.md's links start from the repository's root, the index's from docs. Scripts write the pages of
    results, some without a heading, some with the same. MyST takes every link to Markdown for one to a page.
    """
    to_repository = "../" * (docname.count("/") + 1)
    source[0] = source[0].replace(f"]({to_repository}", f"](path:{to_repository}")
    if README_HERE in source[0]:
        readme = ROOT / "README.md"
        app.env.note_dependency(str(readme))
        text = re.sub(r"\]\((?!#|\w+:|docs/)", "](path:../", readme.read_text()).replace("](docs/", "](")
        source[0] = source[0].replace(README_HERE, text)
    if RESULTS_HERE in source[0]:
        source[0] = source[0].replace(RESULTS_HERE, table_of_results(Path(app.srcdir, docname).parent))
    if docname.startswith("benchmarks/results/2"):
        name = docname.rsplit("/", 1)[1]
        source[0] = f"---\norphan: true\n---\n\n# {name}\n\n" + re.sub(r"\A# ", "## ", source[0])


def page_of(app: Sphinx, file: str) -> str:
    """Name of the page that shows a file of the repository."""
    return (
        "files/" + Path(app.srcdir, file).resolve().relative_to(Path(app.srcdir).resolve().parent).as_posix()
    )


def link_to_pages(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Lead links to files to the pages that show them, or to the picture itself.

    Sphinx would have the browser download the files.
    """
    for link in list(doctree.findall(download_reference)):
        if "filename" not in link:
            continue  # the file does not exist, which the build reports
        _, path = app.env.relfn2path(link["reftarget"], docname)
        if path.endswith(".png"):
            to_root = app.builder.get_relative_uri(docname, "index").removesuffix("index.html")
            uri = f"{to_root}_downloads/{link['filename']}"
        else:
            uri = app.builder.get_relative_uri(docname, page_of(app, path))
        link.replace_self(nodes.reference("", "", *link.children, refuri=uri, internal=True))


def pages_of_files(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """One page for each text file that a document links to."""
    for file in sorted(file for file in app.env.dlfiles if Path(file).suffix != ".png"):
        page = page_of(app, file)
        name, text = page.removeprefix("files/"), Path(app.srcdir, file).read_text()
        code = app.builder.highlighter.highlight_block(text, LANGUAGES.get(Path(file).suffix, "none"))
        body = f"<h1>{html.escape(name)}</h1>\n{code}"
        yield page, {"title": name, "body": body}, "page.html"


def setup(app: Sphinx) -> None:
    app.connect("source-read", edit_source)
    app.connect("doctree-resolved", link_to_pages)
    app.connect("html-collect-pages", pages_of_files)
