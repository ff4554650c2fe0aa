"""The site's configuration, for Sphinx. Its pages are the repository's own, where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.nodes import Element
from ipython_pygments_lexers import IPython3Lexer
from pygments.lexer import bygroups, using
from pygments.token import Keyword, Operator, Text
from sphinx.application import Sphinx
from sphinx.highlighting import lexers

NAVIGATION = {
    "README": [
        "docs/start",
        "docs/howto",
        "docs/guide",
        "docs/gallery",
        "docs/reference",
        "CONTRIBUTING",
    ],
    "docs/start": [
        "notebooks/00_quickstart",
        "notebooks/01_spawn_unchanged",
        "notebooks/torchtpu/*",
        "docs/torchtpu",
        "docs/coming_from",
        "docs/setup",
    ],
    "docs/howto": [
        "docs/howto/spawn_notebook",
        "docs/howto/one_core_to_all",
        "docs/howto/old_notebook",
        "docs/howto/no_tpu",
        "docs/howto/hang",
        "docs/howto/failure",
        "docs/howto/slow",
        "docs/howto/disconnect",
        "docs/howto/resume",
        "docs/howto/sweep",
        "docs/howto/night",
        "docs/howto/pod",
        "docs/howto/elsewhere",
        "docs/howto/script",
    ],
    "docs/guide": [
        "docs/forks",
        "docs/debugging",
        "docs/lint",
        "docs/training",
        "docs/checkpoints",
        "docs/watching",
        "docs/data",
        "docs/rehearsal",
        "docs/hosts",
        "docs/places",
        "docs/money",
        "docs/frameworks",
        "notebooks/02_spmd",
    ],
    "docs/debugging": ["notebooks/10_*"],
    "docs/training": ["notebooks/11_*", "notebooks/12_*", "notebooks/13_*"],
    "docs/checkpoints": ["notebooks/14_*"],
    "docs/frameworks": ["notebooks/frameworks/*"],
    "docs/gallery": ["notebooks/models/*"],
    "docs/reference": [
        "docs/reference/tpunb",
        "docs/reference/training",
        "docs/reference/errors",
    ],
    "CONTRIBUTING": [
        "docs/architecture",
        "docs/diagnose",
        "SECURITY",
        "CHANGELOG",
    ],
}
"""The pages below each page, in order. A page that is in none of these ends the build."""

LAST_OPEN = "where to go next"
"""The last section of the home page that is not folded."""

project = "tpunb"
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "notebooks/**.ipynb"]
exclude_patterns = [".*", "out", "**/runs"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

# Markdown as on GitHub.
myst_heading_anchors = 4


class Cell(IPython3Lexer):
    """Python with magics; below tpunb's own there is Python as well."""

    _below = bygroups(Operator, Keyword, Text, using(IPython3Lexer))
    tokens: ClassVar = {
        **IPython3Lexer.tokens,
        "root": [(r"(?s)(%%)(tpu_\w+)([^\n]*\n)(.*)", _below), *IPython3Lexer.tokens["root"]],
    }


lexers["python"] = lexers["ipython3"] = Cell()

# Notebooks: what `make docs` has executed. The widgets of a run are gone by then; the card that it
# has left is HTML.
nb_execution_mode = "off"
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]
nb_ipywidgets_js: dict[str, Any] = {}  # they would come from another server
nb_merge_streams = True

# Docstrings are written as Markdown: `code`, and indented code below a paragraph.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = "tpunb"
html_static_path = ["static"]
html_css_files = ["tpunb.css"]
html_copy_source = False
html_show_sourcelink = False
html_sidebars = {"README": []}
html_theme_options = {
    "navbar_end": ["theme-switcher"],
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "show_nav_level": 1,
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
    "back_to_top_button": False,
    "secondary_sidebar_items": {"**": ["page-toc"], "docs/coming_from": []},  # it is wide
}
copyright = "the tpunb authors, Apache-2.0"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_config_value("executed", "", "env", str)  # the folder of executed notebooks
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", docstring, priority=0)  # before napoleon
    app.connect("object-description-transform", fold_object)
    app.connect("doctree-read", fold_home)


def read(app: Sphinx, page: str, source: list[str]) -> None:
    """The text of a page: with the pages below it, or of an executed notebook with its outputs."""
    below = NAVIGATION.get(page)
    if below:
        entries = "\n".join(f"/{entry}" for entry in below)
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:glob:\n\n{entries}\n```\n"
    if app.config.executed and page.startswith("notebooks/"):
        copy = Path(app.config.executed, f"{page}.ipynb")
        app.env.note_dependency(copy)
        source[0] = copy.read_text(encoding="utf-8")


def fold(inside: Element, after: int, label: str) -> None:
    """Fold what is in a node after its first children, so that a page is not very long."""
    if len(inside) > after:
        opened = f'<details class="more"><summary>{label}</summary>'
        inside.insert(after, nodes.raw("", opened, format="html"))
        inside.append(nodes.raw("", "</details>", format="html"))


def fold_object(app: Sphinx, domain: str, kind: str, content: Element) -> None:
    """Of a function or class, show the first paragraph of its description."""
    if kind in ("function", "class"):
        first = next((i for i, node in enumerate(content) if isinstance(node, nodes.paragraph)), 0)
        fold(content, first + 1, "parameters and details" if kind == "function" else "details")


def fold_home(app: Sphinx, document: nodes.document) -> None:
    """Of the home page, show how to begin; below the links to the other pages, only headings."""
    if app.env.docname == root_doc:
        [page] = document.findall(
            lambda node: isinstance(node, nodes.section) and node.parent is document
        )
        names = [node["names"][0] if isinstance(node, nodes.section) else "" for node in page]
        for section in page[names.index(LAST_OPEN) + 1 :]:
            if isinstance(section, nodes.section):
                fold(section, 1, "show")


def docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Indented code below a paragraph becomes a block of code."""
    made: list[str] = []
    for number, line in enumerate(lines):
        above = lines[number - 1] if number else ""
        if line.startswith("    ") and not above.strip() and not in_code(made):
            made += [".. code-block:: python", ""]
        made.append(line)
    lines[:] = made


def in_code(made: list[str]) -> bool:
    """Whether the last line that is not empty is indented."""
    written = [line for line in made if line.strip()]
    return bool(written) and written[-1].startswith("    ")
