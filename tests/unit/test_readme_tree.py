"""README.md has one line for each source file, and it is what the file says of itself."""

from __future__ import annotations

import re

from tests import readme_checks, readme_tree


def test_the_readme_lists_every_file() -> None:
    text = readme_tree.README.read_text()
    assert "<!-- tree -->" in text
    assert readme_tree.updated(text) == text, "python -m tests.readme_tree --write"


def test_the_readme_lists_every_check() -> None:
    text = readme_checks.README.read_text()
    assert "<!-- checks -->" in text
    assert readme_checks.updated(text) == text, "python -m tests.readme_checks --write"


def test_every_file_says_what_it_is_for() -> None:
    listed = readme_tree.tree().splitlines()
    mute = [line for line in listed if line.startswith("  ") and len(line.split()) < 4]
    assert not mute


def test_every_block_is_closed_and_every_link_of_the_contents_has_its_section() -> None:
    lines = readme_tree.README.read_text().splitlines()
    fences = [line for line in lines if line.startswith("```")]
    assert all(len(opened) > 3 for opened in fences[::2]) and set(fences[1::2]) == {"```"}
    links = set(re.findall(r"\]\(#([\w-]+)\)", "\n".join(lines)))
    sections = {
        re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
        for line in lines
        if line.startswith("## ")
    }
    assert links and links <= sections
