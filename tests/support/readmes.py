"""The documents of the tree: which there are, their fenced blocks, and what their headings are linked by.

Neighbours: `readme_commands.py` judges their commands. Knows nothing of what any of them says.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "examples" / "guides"
# The log of measurements: commands of older commits, and as long as it has to be.
_LOG = ROOT / "tests" / "bench" / "RESULTS.md"
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
    """Each Markdown page of the tree but the log of measurements, the front page first."""
    pages = (Path(name) for name in listed("*.md"))
    return sorted((page for page in pages if page != _LOG), key=lambda page: (len(page.parts), page))


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


def running_text(readme: Path) -> str:
    """All of it but its fenced blocks."""
    return _FENCE.sub("", readme.read_text())


def anchors(readme: Path) -> set[str]:
    """What its headings are linked by."""
    headings = re.findall(r"^#+ +(.*)$", running_text(readme), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
