"""`make docs`: the site is whole, needs no network, and has every public name."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest

import tpunb
from tpunb import errors, training

# A build of all pages, and an executed notebook.
pytestmark = pytest.mark.usefixtures("lent")

ROOT = Path(__file__).parents[2]
OUTPUTS = [
    nbformat.v4.new_output("stream", name="stdout", text="[0] trained on 4 cores\n"),
    nbformat.v4.new_output("stream", name="stderr", text="a note\n"),
    nbformat.v4.new_output(
        "display_data",
        {
            "application/vnd.jupyter.widget-view+json": {"model_id": "gone"},
            "text/html": "<div style='border-left:3px solid'>a run's <b>card</b></div>",
            "text/plain": "a run's card",
        },
    ),
]


@pytest.fixture(scope="module")
def site(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, with the saved notebooks, of which the first has outputs."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    first = folder / "notebooks/00_quickstart.ipynb"
    notebook = nbformat.read(first, as_version=4)
    notebook.cells[-1].outputs = OUTPUTS
    nbformat.write(notebook, first)
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, 'docs/site'); import build\n"
        "sys.exit(build.build(Path(sys.argv[1], 'out'), Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return folder / "out"


class Page(HTMLParser):
    """Where a page's links lead, what it loads, and which places it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("link", "script", "img", "iframe", "source"):
            self.loaded += [given[name] for name in ("href", "src") if name in given]


def test_site_links_resolve_and_no_external_file_is_loaded(site: Path) -> None:
    written = [path for path in site.rglob("*.html") if "_static" not in path.parts]
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in written}
    assert len(pages) > 60
    assert site / "index.html" in pages
    wrong, checked = [], 0
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme == "data" or (parts.scheme and link in page.links):
                continue
            checked += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if parts.scheme or parts.netloc or not target.is_file():
                wrong.append(f"{path.relative_to(site)}: {link}")
            elif parts.fragment and target.suffix == ".html":
                places = pages[site / target.relative_to(site.resolve())].places
                if unquote(parts.fragment) not in places:
                    wrong.append(f"{path.relative_to(site)}: {link}")
    for sheet in site.rglob("*.css"):
        found = re.findall(
            r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')]+)""", sheet.read_text()
        )
        wrong += [f"{sheet.relative_to(site)}: {address}" for address in found]
    assert not wrong
    assert checked > 3000
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    found = json.loads(index.removeprefix("Search.setIndex(").removesuffix(")"))
    sources = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), *ROOT.glob("notebooks/**/*.ipynb")]
    named = [path.relative_to(ROOT).with_suffix("") for path in sources if "runs" not in path.parts]
    assert set(map(str, named)) == set(found["docnames"])
    hits = found["terms"]["papermil"]  # the stem
    assert "docs/guide" in [found["docnames"][number] for number in hits]


def test_site_reference_has_every_public_name(site: Path) -> None:
    packed = (site / "objects.inv").read_bytes().split(b"\n", maxsplit=4)[4]
    documented = {line.split()[0] for line in zlib.decompress(packed).decode().splitlines()}
    wanted = {f"tpunb.{name}" for name in tpunb.__all__}
    wanted |= {f"tpunb.training.{name}" for name in training.__all__}
    wanted |= {f"tpunb.errors.{name}" for name in vars(errors) if name.endswith("Error")}
    assert wanted <= documented, wanted - documented
    page = (site / "docs/reference/tpunb.html").read_text(encoding="utf-8")
    assert "Of more than 50 MB" in page  # a method's docstring
    assert "The peak memory of each rank in bytes" in page  # a field's
    assert page.count('<div class="highlight-python') >= 2  # examples of launch, on_log and more


def test_site_shows_notebooks_with_outputs(site: Path) -> None:
    page = (site / "notebooks/00_quickstart.html").read_text(encoding="utf-8")
    assert "[0] trained on 4 cores" in page
    assert "a run's <b>card</b>" in page
    assert "widget" not in page.partition("<article")[2]
