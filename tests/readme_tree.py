"""The files of the product, a line each: `python -m tests.readme_tree [FOLDER…]` prints them.

A line is the first sentence of the file's own docstring, or of its leading comment where it is no Python.
"""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

from tests.support import readmes

FOLDERS = ("launcher", "runtime", "sky", "examples")
_SUFFIXES = {".py", ".yaml", ".toml"}


def tree(folder: str) -> str:
    """Every source file of a folder, and of those in it, with what it is for."""
    paths = [Path(name).relative_to(readmes.ROOT) for name in readmes.listed(folder)]
    lines: list[str] = []
    at = Path()
    for path in sorted(paths, key=lambda path: (path.parts[:-1], path.name)):
        if path.suffix not in _SUFFIXES:
            continue
        if path.parent != at:
            at = path.parent
            lines.append(f"{at}/")
        if sentence := _sentence(readmes.ROOT / path):
            lines.append(f"  {path.name:<22} {sentence}")
    return "\n".join(lines)


def _sentence(path: Path) -> str:
    """The first sentence a file says of itself."""
    text = path.read_text()
    if path.suffix == ".py":
        said = ast.get_docstring(ast.parse(text)) or ""
    else:
        said = "\n".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    paragraph = " ".join(said.partition("\n\n")[0].split())
    return re.split(r"(?<=[a-z)`\]])\. ", paragraph)[0].rstrip(".:")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="tests.readme_tree")
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    for folder in parser.parse_args().folders:
        print(tree(folder))
