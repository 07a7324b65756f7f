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
