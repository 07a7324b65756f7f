"""Tests that names in docstrings, as in :func:`rotary`, exist and become links."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import posembed as pe
import pytest
from support.documentation import program

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "posembed"
MARKED = re.compile(r":(?:func|class|meth|mod|attr):`([^`]+)`")


def marked() -> list[tuple[str, str]]:
    """Each module and a name that it marks."""
    result = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(("posembed", *path.relative_to(PACKAGE).with_suffix("").parts))
        for name in sorted(set(MARKED.findall(path.read_text(encoding="utf-8")))):
            result.append((module.removesuffix(".__init__"), name))
    return result


def find(scope: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(scope, part):
            return part in getattr(scope, "__annotations__", {})
        scope = getattr(scope, part)
    return True


@pytest.mark.parametrize(("module", "name"), marked())
def test_marked_names_exist(module: str, name: str) -> None:
    if module in ("posembed.integrations.torchrec", "posembed.integrations.torchtitan"):
        pytest.importorskip(module.rpartition(".")[2])
    where = importlib.import_module(module)
    classes = [value for value in vars(where).values() if isinstance(value, type)]
    importlib.import_module("posembed.analysis")  # users import it themselves
    package = type("Package", (), {"posembed": pe})  # for full names
    assert any(find(scope, name) for scope in (where, *classes, pe, pe.functional, package))


@pytest.fixture(scope="module")
def roles() -> ModuleType:
    return program("roles")


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("forward", '<a class="autorefs" href="#posembed.ALiBi.forward"><code>forward</code></a>'),
        ("ALiBi", '<a class="autorefs" href="#posembed.ALiBi"><code>ALiBi</code></a>'),
        (
            "rotary",
            '<a class="autorefs" href="#posembed.functional.rotary"><code>rotary</code></a>',
        ),
        ("elsewhere", "<code>elsewhere</code>"),
    ],
)
def test_marked_names_become_links(name: str, written: str, roles: ModuleType) -> None:
    headings = [
        f'<h3 id="{place}" class="doc">'
        for place in (
            "posembed.functional.rotary",
            "posembed.Other.forward",
            "posembed.ALiBi.forward",
            "posembed.ALiBi",
        )
    ]
    page = "".join(headings) + f"<p>See :meth:<code>{name}</code>.</p>"
    assert roles.with_links(page) == "".join(headings) + f"<p>See {written}.</p>"


def test_bases_that_are_not_public_are_not_shown(roles: ModuleType) -> None:
    line = '<p class="doc doc-class-bases">\n  Bases: {}</p>'
    leaf = '<code><span title="posembed._leaf.Leaf">Leaf</span></code>'
    module = '<code><span title="torch.nn.Module">Module</span></code>'
    link = '<code><a title="posembed.TokenEmbedding" href="#posembed.TokenEmbedding">T</a></code>'
    for bases, expected in (
        (f"{leaf}, {module}", line.format(module)),
        (f"{leaf}, {leaf}", ""),
        (f"{module}", line.format(module)),
        (f"{link}", line.format(link)),
    ):
        assert roles.without_inner_bases(line.format(bases)) == expected


# Methods that posembed itself calls on its modules.
INNER = {"host_names", "near", "row_ids", "rows_at", "use_table"}


def described() -> dict[str, str]:
    """The options of each name in the reference."""
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^::: posembed\.(\S+)\n((?: +.*\n)*)", page + "\n", re.MULTILINE))


def test_reference_has_methods_of_bases_that_it_does_not_describe() -> None:
    options = described()
    classes = {
        name: getattr(pe, name) for name in options if isinstance(getattr(pe, name, 0), type)
    }
    assert len(classes) > 15
    for name, cls in classes.items():
        inner = [
            base
            for base in cls.__mro__
            if base.__module__.startswith("posembed") and base not in classes.values()
        ]
        if pe.scaling.Scaling in inner:
            continue
        methods = {
            method
            for base in inner
            for method, value in vars(base).items()
            if not method.startswith("_") and (callable(value) or isinstance(value, property))
        }
        methods -= {method for method in vars(cls) if method in methods}
        shown = re.search(r"inherited_members: \[(.*?)\]", options[name])
        listed = set() if shown is None else set(shown[1].split(", "))
        assert methods - INNER <= listed, name
        assert all(any(find(base, method) for base in cls.__mro__) for method in listed), name


def test_reference_shows_no_private_names() -> None:
    assert 'filters: ["!^_"]' in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name", ["analysis", "data", "functional", "plot", "positions", "pretrained"]
)
def test_reference_shows_public_names_of_a_module(name: str) -> None:
    assert "filters: public" in described()[name]
    module = getattr(pe, name)
    assert len(module.__all__) == len(set(module.__all__))
    assert all(hasattr(module, each) for each in module.__all__)
    if name != "functional":
        names = {each for each in dir(module) if not each.startswith("_")}
        assert names <= {*module.__all__}
