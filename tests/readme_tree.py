"""The lists of files in the READMEs, one line each: `python -m tests.readme_tree --write` makes them anew.

A list stands in a ```text block below a line `<!-- tree: FOLDER -->` and has the folder's own folders too.
A line is the first sentence of the file's own docstring, or of its leading comment where it is no Python.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from tests.support import readmes

# Every folder of the product has its list in one README or another; the examples have a table with links.
ROOMS = ("launcher", "runtime", "sky")
_BLOCK = re.compile(r"(<!-- tree: (?P<room>\S+) -->\n+```text\n)(?:|.*?\n)(```\n)", re.DOTALL)
_SUFFIXES = {".py", ".yaml", ".toml"}


def tree(room: str) -> str:
    """Every source file of a folder with what it is for."""
    paths = [Path(name).relative_to(readmes.ROOT) for name in readmes.listed(room)]
    lines: list[str] = []
    folder = Path()
    for path in sorted(paths, key=lambda path: (path.parts[:-1], path.name)):
        if path.suffix not in _SUFFIXES:
            continue
        if path.parent != folder:
            folder = path.parent
            lines.append(f"{folder}/")
        sentence = _sentence(readmes.ROOT / path)
        if sentence:
            lines.append(f"  {path.name:<22} {sentence}")
    return "\n".join(lines)


def rooms(text: str) -> list[str]:
    """The folders whose lists a README has."""
    return [found["room"] for found in _BLOCK.finditer(text)]


def updated(text: str) -> str:
    """A README with the real lists."""
    return _BLOCK.sub(lambda found: f"{found[1]}{tree(found['room'])}\n{found[3]}", text)


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
    sys.exit(readmes.bring(updated))
