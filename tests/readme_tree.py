"""The list of files in README.md, one line each: `python -m tests.readme_tree --write` brings it up to date.

A line is the first sentence of the file's own docstring, or of its leading comment where it is no Python.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
ROOMS = ("launcher", "runtime", "sky", "examples")
_BLOCK = re.compile(r"(<!-- tree -->\n+```text\n)(?:|.*?\n)(```\n)", re.DOTALL)
_SUFFIXES = {".py", ".yaml", ".toml"}


def tree() -> str:
    """Every source file of the product with what it is for."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *ROOMS],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    lines: list[str] = []
    folder = Path()
    for path in sorted(map(Path, listed.stdout.split()), key=lambda path: (path.parts[:-1], path.name)):
        if path.suffix not in _SUFFIXES or not (ROOT / path).exists():
            continue
        if path.parent != folder:
            folder = path.parent
            lines.append(f"{folder}/")
        sentence = _sentence(ROOT / path)
        if sentence:
            lines.append(f"  {path.name:<22} {sentence}")
    return "\n".join(lines)


def updated(text: str) -> str:
    """The README with the real tree."""
    return _BLOCK.sub(lambda match: f"{match[1]}{tree()}\n{match[2]}", text)


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
    before = README.read_text()
    after = updated(before)
    if "--write" in sys.argv:
        README.write_text(after)
    sys.exit(0 if "--write" in sys.argv or before == after else "README.md is behind: --write")
