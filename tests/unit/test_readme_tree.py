"""The READMEs: a line for each source file, links that lead somewhere, and the front one short."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests import readme_checks, readme_tree
from tests.support import readmes

MOST_LINES = 250


def test_every_folder_of_the_product_has_its_list_and_it_is_the_real_one() -> None:
    texts = {path: path.read_text() for path in readmes.every()}
    listed = [room for text in texts.values() for room in readme_tree.rooms(text)]
    assert sorted(listed) == sorted(readme_tree.ROOMS)
    for path, text in texts.items():
        assert readme_tree.updated(text) == text, f"{path}: python -m tests.readme_tree --write"


def test_the_readme_lists_every_check() -> None:
    text = readme_checks.README.read_text()
    assert "<!-- checks -->" in text
    assert readme_checks.updated(text) == text, "python -m tests.readme_checks --write"


def test_every_file_says_what_it_is_for() -> None:
    listed = [line for room in readme_tree.ROOMS for line in readme_tree.tree(room).splitlines()]
    assert not [line for line in listed if line.startswith("  ") and len(line.split()) < 4]


def test_the_front_readme_is_read_in_two_minutes() -> None:
    assert len((readmes.ROOT / "README.md").read_text().splitlines()) <= MOST_LINES


def test_every_block_is_closed_and_every_link_leads_somewhere() -> None:
    dead = []
    for readme in readmes.every():
        fences = [line.strip() for line in readme.read_text().splitlines() if line.strip().startswith("```")]
        assert all(len(opened) > 3 for opened in fences[::2]) and set(fences[1::2]) <= {"```"}, readme
        for link in re.findall(r"\]\(([^)\s]+)\)", readme.read_text()):
            path, _, anchor = link.partition("#")
            there = (readme.parent / path).resolve() if path else readme
            if not there.exists() or (anchor and anchor not in _sections(there)):
                dead.append(f"{readme.relative_to(readmes.ROOT)}: {link}")
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


def test_every_message_of_the_troubleshooting_is_one_that_is_said() -> None:
    text = (readmes.ROOT / "launcher" / "README.md").read_text()
    table = text.partition("## Troubleshooting a rented run\n")[2].partition("\n## ")[0]
    messages = [
        found for row in re.findall(r"^\| (`.*?) \|", table, re.M) for found in re.findall(r"`(.*?)`", row)
    ]
    # What stands for a value here is one in the text, and a phase's name begins the line that says it failed.
    parts = [part.strip() for message in messages for part in re.split("…|^setup ", message) if part.strip()]
    said = "\n".join(_texts(readmes.ROOT / "launcher"))
    assert len(messages) > 10
    assert not [part for part in parts if part not in said]


def _texts(folder: Path) -> list[str]:
    """Every text of the sources there, in one piece between two values."""
    parsed = (ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py")))
    constants = (node.value for tree in parsed for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [text for text in constants if isinstance(text, str)]


def _sections(path: Path) -> set[str]:
    """The anchors of a README's headings."""
    headings = (line for line in path.read_text().splitlines() if line.startswith("#"))
    return {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in headings}
