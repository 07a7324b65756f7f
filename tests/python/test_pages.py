"""Tests that pages read as they stand in the repository: links, pictures, no syntax of a site."""

import functools
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from support.documentation import program

markdown_it = pytest.importorskip("markdown_it")

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for folder in ("*.md", "hub/*.md", "docs/**/*.md", "benchmarks/results/*.md")
    for page in ROOT.glob(folder)
)
# What a renderer leaves as text if it is no Markdown, or not well formed.
LEFTOVER = re.compile(
    r":::|--8<--|^!!!|^\?\?\?|^===|\{[:.#] ?\w|:(?:func|class|meth|mod|attr):|!\[|\]\(|\*\*(?=\S)|(?<=\S)\*\*|``"
    r"|\$\$|#only-|^\|.*\|$|</?\w+>"
)
ATTRIBUTE = re.compile(r'(?:src|srcset|href)="([^"]*)"')
COMMENT = re.compile(r"<!-- (?:written: (?:python|header|table) [\w./ ]+|end) -->|<!-- \w.*? -->")
PICTURES = 3_000_000  # bytes of all committed pictures, those in notebooks included


def slug(title: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


class Walk:
    """The links, pictures, anchors and texts of a page, as a renderer sees them."""

    def __init__(self, text: str) -> None:
        self.links: list[str] = []
        self.pictures: list[str] = []
        self.anchors: set[str] = set()
        self.texts: list[str] = []
        tokens = markdown_it.MarkdownIt("commonmark").enable("table").parse(text)
        for before, token in zip([None, *tokens], tokens, strict=False):
            if token.type == "html_block":
                self.html(token.content)
            elif token.type == "inline":
                heading = before is not None and before.type == "heading_open"
                self.inline(token.children, heading)

    def html(self, content: str) -> None:
        """A comment of the generator, or a picture with a form for dark pages."""
        content = COMMENT.sub("", content)
        assert re.sub(r"</?(?:picture|source|img|abbr)\b[^>]*>", "", content).strip() == "", content
        self.pictures += ATTRIBUTE.findall(content)
        assert content.count("<picture>") == content.count("<source") == content.count("<img")
        assert content.count('alt="') == content.count("<img")

    def inline(self, children: list[object], heading: bool) -> None:
        words = ""
        for token in children:
            if token.type == "link_open":
                self.links.append(token.attrs["href"])
            elif token.type == "image":
                self.pictures.append(token.attrs["src"])
            elif token.type in ("text", "code_inline"):
                words += token.content
            if token.type in ("text", "html_inline"):
                self.texts.append(token.content)
        if heading:
            name, number = slug(words), 0
            while (anchor := name if number == 0 else f"{name}-{number}") in self.anchors:
                number += 1
            self.anchors.add(anchor)


@functools.cache
def walk(page: str) -> Walk:
    return Walk((ROOT / page).read_text(encoding="utf-8"))


@functools.cache
def committed() -> frozenset[str]:
    """The files that git has or would take, and their folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    folders = {str(parent) for name in files for parent in Path(name).parents}
    return frozenset(files | folders)


def target(page: str, link: str) -> str:
    """The file that a link of a page leads to, from the root."""
    path = (ROOT / page).parent / link if link else ROOT / page
    return path.resolve().relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_lead_to_files_of_the_repository(page: str) -> None:
    found = walk(page)
    missing = [picture for picture in found.pictures if target(page, picture) not in committed()]
    for link in found.links:
        if re.match(r"https?:|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        file = target(page, path)
        if file not in committed() or (anchor and anchor not in walk(file).anchors):
            missing.append(link)
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_nothing_but_markdown_is_on_a_page(page: str) -> None:
    assert [text for text in walk(page).texts if LEFTOVER.search(text)] == []


def test_tables_are_narrow() -> None:
    """Wider ones are turned: nobody can read a cell against a head that has left the screen."""
    wide = {
        page: line
        for page in PAGES
        for line in (ROOT / page).read_text(encoding="utf-8").splitlines()
        if re.fullmatch(r"\|(?:[-:]+\|){10,}", line)
    }
    assert wide == {}


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    for name in ("griffe", "matplotlib"):
        pytest.importorskip(name)
    return program("pages")


def test_generated_parts_are_current(pages: ModuleType) -> None:
    made = pages.pages()
    assert len(made) >= 6
    stale = [path.name for path, text in made.items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run python docs/pages.py"


def test_pictures_are_small() -> None:
    endings = (".png", ".svg", ".gif", ".ipynb")
    files = [ROOT / name for name in committed() if name.endswith(endings)]
    assert len(files) > 30
    assert sum(path.stat().st_size for path in files) <= PICTURES


def test_every_picture_is_shown() -> None:
    shown = {target(page, picture) for page in PAGES for picture in walk(page).pictures}
    made = {name for name in committed() if re.match(r"docs/(?:pictures|charts)/", name)}
    assert made <= shown
