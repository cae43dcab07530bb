"""The documents: short, every link and path leads somewhere, and what they quote is what the code says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support import readme_commands, readmes
from tests.unit.test_tree import FLOORS

# Words. The log of measurements is no page to read, and is not counted.
MOST_WORDS = {"README.md": 800, "launcher/README.md": 1_500, "runtime/README.md": 2_500}
MOST_WORDS_TOGETHER = 16_000
# A file of the tree, in running text: `run/ending.py`.
_PATH = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|md|yaml|ipynb))`")


@pytest.mark.parametrize("page", MOST_WORDS)
def test_a_page_is_as_short_as_was_agreed(page: str) -> None:
    assert _words(readmes.ROOT / page) <= MOST_WORDS[page]


def test_all_pages_together_are_read_in_an_hour() -> None:
    counted = {str(page.relative_to(readmes.ROOT)): _words(page) for page in readmes.every()}
    assert sum(counted.values()) <= MOST_WORDS_TOGETHER, counted


def test_n18_the_front_page_says_how_to_install_it_and_links_changes_and_contributing() -> None:
    """That such a wheel works: e2e/test_quickstart.py."""
    front = (readmes.ROOT / "README.md").read_text()
    assert "`uv build --wheel`" in front
    assert {"(examples/guides/changelog.md)", "(tests/README.md)"} <= set(
        re.findall(r"\([\w./]+\.md\)", front)
    )


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


def test_every_file_that_a_page_names_is_there() -> None:
    absent = [
        f"{page.relative_to(readmes.ROOT)}: {name}"
        for page in readmes.every()
        for name in _PATH.findall(readmes.running_text(page))
        if name not in readme_commands.PLACEHOLDERS
        and not any((place / name).exists() for place in (page.parent, readmes.ROOT))
    ]
    assert not absent


def test_the_rooms_stand_in_the_order_of_their_floors() -> None:
    assert _rooms("launcher", r"\d+ \| ") == FLOORS["launcher"]


def test_the_runtimes_rooms_stand_in_the_order_of_their_floors() -> None:
    """The last floor is the half itself."""
    assert _rooms("runtime", "") == (*FLOORS["runtime"][:-1], *FLOORS["tiny"])


@pytest.mark.process
def test_every_message_of_the_troubleshooting_is_one_that_is_said() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (readmes.GUIDES / "troubleshooting.md").read_text(), re.MULTILINE)
    messages = [found for row in rows for found in re.findall(r"`(.*?)`", row)]
    # What stands for a value here is one in the text, and a phase's name begins the line that says it failed.
    parts = [part.strip() for message in messages for part in re.split("…|^setup ", message) if part.strip()]
    said = "\n".join(_texts(readmes.ROOT / "launcher"))
    assert len(messages) > 10
    assert not [part for part in parts if part not in said]


def _words(page: Path) -> int:
    return len(page.read_text().split())


def _leads(there: Path, anchor: str) -> bool:
    return there.exists() and (not anchor or anchor in readmes.anchors(there))


def _rooms(half: str, before: str) -> tuple[str, ...]:
    """The folders in the first column of a half's page, behind what stands before it in a row."""
    page = (readmes.ROOT / half / "README.md").read_text()
    text = page.partition("\n## Folders\n")[2].partition("\n## ")[0]
    return tuple(f"{half}/{room}" for room in re.findall(rf"^\| {before}`([\w/]+)/` \|", text, re.MULTILINE))


def _texts(folder: Path) -> list[str]:
    """Every text of the sources there, in one piece between two values."""
    parsed = (ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py")))
    constants = (node.value for tree in parsed for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [text for text in constants if isinstance(text, str)]
