"""The documents: every link and path leads somewhere, and what they quote is what the code says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.support import readmes
from tests.unit.test_tree import FLOORS

MOST_LINES = 250


def test_the_front_readme_is_read_in_two_minutes() -> None:
    assert len((readmes.ROOT / "README.md").read_text().splitlines()) <= MOST_LINES


def test_every_block_is_closed_and_every_link_leads_somewhere() -> None:
    dead = []
    for page in readmes.every():
        fences = [line.strip() for line in page.read_text().splitlines() if line.strip().startswith("```")]
        assert all(len(opened) > 3 for opened in fences[::2]) and set(fences[1::2]) <= {"```"}, page
        for link in re.findall(r"\]\(([^)\s]+)\)", readmes.running_text(page)):
            path, _, anchor = link.partition("#")
            there = (page.parent / path).resolve() if path else page
            if not link.startswith("https://") and not _leads(there, anchor):
                dead.append(f"{page.relative_to(readmes.ROOT)}: {link}")
    assert not dead


def test_every_file_that_a_table_names_is_there() -> None:
    for room in ("launcher", "runtime"):
        text = (readmes.ROOT / room / "README.md").read_text()
        where = text.partition("## Where is …?\n")[2].partition("\n## ")[0]
        named = re.findall(
            r"`([\w.]+/[\w./]+\.(?:py|yaml)|\w+\.py)`", re.sub(r"^\| [^|]*", "", where, flags=re.M)
        )
        assert len(named) >= 25 or room == "runtime"
        assert not [name for name in named if not (readmes.ROOT / room / name).exists()]


def test_the_rooms_stand_in_the_order_of_their_floors() -> None:
    assert _rooms("launcher", r"\d+ \| ") == FLOORS["launcher"]


def test_every_message_of_the_troubleshooting_is_one_that_is_said() -> None:
    text = (readmes.ROOT / "launcher" / "README.md").read_text()
    table = text.partition("## Troubleshooting a rented run\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    messages = [found for row in rows for found in re.findall(r"`(.*?)`", row)]
    # What stands for a value here is one in the text, and a phase's name begins the line that says it failed.
    parts = [part.strip() for message in messages for part in re.split("…|^setup ", message) if part.strip()]
    said = "\n".join(_texts(readmes.ROOT / "launcher"))
    assert len(messages) > 10
    assert not [part for part in parts if part not in said]


def _leads(there: Path, anchor: str) -> bool:
    return there.exists() and (not anchor or anchor in readmes.anchors(there))


def _rooms(half: str, before: str) -> tuple[str, ...]:
    """The folders in the first column of a half's page, behind what stands before it in a row."""
    text = (readmes.ROOT / half / "README.md").read_text().partition("\n## Rooms\n")[2].partition("\n## ")[0]
    return tuple(f"{half}/{room}" for room in re.findall(rf"^\| {before}`([\w/]+)/` \|", text, re.MULTILINE))


def _texts(folder: Path) -> list[str]:
    """Every text of the sources there, in one piece between two values."""
    parsed = (ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py")))
    constants = (node.value for tree in parsed for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [text for text in constants if isinstance(text, str)]
