"""The ways of four flags in launcher/README.md: each stop has the value, and few steps climb back."""

from __future__ import annotations

import ast
import itertools
import re

import pytest

from tests.support.readmes import ROOT
from tests.unit.test_tree import FLOORS

MOST_CLIMBS = 3
FLAGS = ("--budget", "--model", "--lease", "--set train.learning_rate")
_STOP = re.compile(r"^\| `([\w/]+\.py):([\w.]+)` \| `(\w+)` \|$", re.MULTILINE)


def _way(flag: str) -> tuple[int, list[tuple[str, str, str]]]:
    """The climbs that the table says, and its stops: file, function, the name the value goes by."""
    text = (ROOT / "launcher" / "README.md").read_text()
    found = re.search(
        rf"^\*\*`{re.escape(flag)}`\*\*, climbs: (\d+)\n(.*?)(?=^\*\*`--|^## )", text, re.M | re.S
    )
    assert found is not None, flag
    return int(found[1]), _STOP.findall(found[2])


def test_the_rooms_stand_in_the_order_of_their_floors() -> None:
    text = (ROOT / "launcher" / "README.md").read_text()
    rooms = re.findall(r"^\| \d+ \| `([\w/]+)/` \|", text, re.M)
    assert tuple(f"launcher/{room}" for room in rooms) == FLOORS["launcher"]


@pytest.mark.parametrize("flag", FLAGS)
def test_each_stop_of_a_flag_is_there_and_has_the_value(flag: str) -> None:
    _, stops = _way(flag)
    assert len(stops) >= 5
    assert not [stop for stop in stops if stop[2] not in _names(*stop[:2])]


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_climbs_as_often_as_is_said_and_seldom(flag: str) -> None:
    said, stops = _way(flag)
    floors = [_floor(file) for file, _, _ in stops]
    climbs = sum(there[0] == here[0] and there[1] > here[1] for here, there in itertools.pairwise(floors))
    assert climbs == said <= MOST_CLIMBS


def _floor(file: str) -> tuple[str, int]:
    room = file.rpartition("/")[0]
    half = file.partition("/")[0]
    return half, FLOORS[half].index(room)


def _names(file: str, function: str) -> set[str]:
    """Every name, attribute, argument and keyword in a function."""
    name = function.rpartition(".")[2]
    parsed = ast.parse((ROOT / file).read_text())
    bodies = [node for node in ast.walk(parsed) if isinstance(node, ast.FunctionDef) and node.name == name]
    names: set[str] = set()
    for node in (inner for body in bodies for inner in ast.walk(body)):
        match node:
            case ast.Name(id=found) | ast.Attribute(attr=found) | ast.arg(arg=found):
                names.add(found)
            case ast.keyword(arg=str(found)) | ast.Constant(value=str(found)):
                names.add(found)
    return names
