"""The tree's fences see an import through a package, by a name in a string, and for a type checker alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.import_graph import ImportGraph, circles

LAZY = """
from importlib import import_module
_LATER = {"Thing": "low.thing"}
def __getattr__(name):
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
"""


@pytest.mark.parametrize(
    "source",
    [
        "from house.low.thing import Thing",
        "from house.low import thing",
        "from house.low import Thing",
        "from .low import Thing",
        "import house.low.thing",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.low.thing import Thing",
        "def late():\n    from house.low.thing import Thing",
        "from importlib import import_module\nimport_module('house.low.thing')",
        "import importlib\nimportlib.import_module('.low.thing', __package__)",
        "import importlib\nfor name in ['house.low.thing']:\n    importlib.import_module(name)",
        "from house import Thing",
    ],
)
def test_a_circle_is_seen_whichever_way_it_is_imported(tmp_path: Path, source: str) -> None:
    """`house.top` imports `house.low.thing`, which imports `house.top`."""
    (tmp_path / "house/low").mkdir(parents=True)
    files = {
        "house/__init__.py": LAZY if source == "from house import Thing" else "",
        "house/top.py": source,
        "house/low/__init__.py": "from house.low.thing import Thing",
        "house/low/thing.py": "from house.top import *",
        "house/apart.py": "import house.top",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    graph = ImportGraph(tmp_path)
    imports = {graph.name_of(tmp_path / name): graph.imported(tmp_path / name) for name in files}
    (circle,) = circles(imports)
    doors = {"house", "house.low"}
    assert {*circle} - doors == {"house.top", "house.low.thing"}


def test_what_imports_downwards_is_no_circle(tmp_path: Path) -> None:
    for name, text in {"a": "import b, c", "b": "import c", "c": "import json"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    graph = ImportGraph(tmp_path)
    assert not circles({name: graph.imported(tmp_path / f"{name}.py") for name in "abc"})
