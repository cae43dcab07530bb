"""The READMEs of the tree: which there are, their fenced blocks, and making their made parts anew.

Neighbours: `readme_tree.py`, `readme_blocks.py` and `readme_checks.py` make their parts, `readme_commands.py`
judges their commands. Knows nothing of what any part says.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(?P<language>\S*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Fence:
    """A fenced block: what its first line says it holds, its text, and the line that its text begins on."""

    readme: Path
    language: str
    text: str
    line: int

    @property
    def where(self) -> str:
        """For the message of a test."""
        return f"{self.readme.relative_to(ROOT)}:{self.line}"


def every() -> list[Path]:
    """Each README.md of the tree, the root's first."""
    return sorted(map(Path, listed("*README.md")), key=lambda path: (len(path.parts), path))


def listed(*patterns: str) -> list[str]:
    """The files that are, or will be, in the repository; absolute."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "--", *patterns]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [str(ROOT / name) for name in done.stdout.splitlines() if (ROOT / name).exists()]


def fences(readme: Path) -> list[Fence]:
    """Its fenced blocks, in order."""
    text = readme.read_text()
    return [
        Fence(readme, found["language"], found["text"], text.count("\n", 0, found.start("text")) + 1)
        for found in _FENCE.finditer(text)
    ]


def bring(updated: Callable[[str], str]) -> int:
    """Check each README, or write it anew with `--write`; the exit code."""
    behind = []
    for readme in every():
        text = readme.read_text()
        if (new := updated(text)) != text:
            behind.append(str(readme.relative_to(ROOT)))
            if "--write" in sys.argv:
                readme.write_text(new)
    if behind and "--write" not in sys.argv:
        print(f"{', '.join(behind)}: behind, --write brings it up to date", file=sys.stderr)
        return 1
    return 0
