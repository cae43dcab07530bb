"""The documents: what they say of the house is so."""

from __future__ import annotations

import re

from tests.support import readmes
from tests.unit.test_tree import FLOORS


def test_the_rooms_stand_in_the_order_of_their_floors() -> None:
    text = (readmes.ROOT / "launcher" / "README.md").read_text()
    rooms = re.findall(r"^\| \d+ \| `([\w/]+)/` \|", text, re.M)
    assert tuple(f"launcher/{room}" for room in rooms) == FLOORS["launcher"]
