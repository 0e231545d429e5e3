"""The documentation's site builds without a network, and whatever its pages point to is there."""

import os
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

import holdfast

ROOT = Path(__file__).parents[1]
pytest.importorskip("zensical", reason="needs zensical, which pip install 'holdfast[dev]' brings")


class Page(HTMLParser):
    """What a page points to, and the places in it that can be pointed to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id":
                self.places.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    # it builds only what lies beside the configuration, and leaves a cache there
    for name in ("docs", "src"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "zensical.toml").write_text((ROOT / "zensical.toml").read_text().replace("build/site", "site"))
    environment = os.environ | {"PYTHONPATH": str(ROOT / "packaging" / "site"), "NO_COLOR": "1"}
    start = time.monotonic()
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - start < 60
    return folder / "site"


@pytest.mark.slow
def test_every_link_leads_somewhere(site):
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:|//", link):
                continue
            name, _, place = link.partition("#")
            to = (path.parent / name.partition("?")[0]).resolve() if name else path
            to = to / "index.html" if to.is_dir() else to
            # __: what the theme's own controls are called
            if not to.exists() or (place and to in pages and place[:2] != "__" and place not in pages[to].places):
                broken.append((str(path.relative_to(site)), link))
    assert not broken
    assert len(pages) > 80


@pytest.mark.slow
def test_nothing_is_fetched_from_elsewhere(site):
    """No font, script or picture of a page comes from another host."""
    fetched = re.compile(r"""<(?:script|img|link)[^>]+(?:src|href)=["']?(https?:)?//""")
    assert not [str(path) for path in site.rglob("*.html") if fetched.search(path.read_text())]


@pytest.mark.slow
def test_equations_are_set(site):
    for source in (ROOT / "docs").rglob("*.md"):
        fences = len(re.findall("^```math$", source.read_text(), re.M))
        if fences:
            page = site / source.relative_to(ROOT / "docs").with_suffix("") / "index.html"
            assert page.read_text().count("<math") == fences, source


@pytest.mark.slow
def test_the_reference_has_every_public_name(site):
    text = "".join(path.read_text() for path in (site / "api").rglob("*.html"))
    names = {name for name in holdfast.__all__ if name not in ("RECURRENCES", "Cell", "__version__", "nn", "ops")}
    assert not {name for name in names | set(holdfast.nn.__all__) if not re.search(rf'id="[\w.]+\.{name}"', text)}


def test_every_page_is_in_the_navigation():
    config = (ROOT / "zensical.toml").read_text()
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages == set(re.findall(r'"([\w/-]+\.md)"', config))
