"""Which instants the runtime's code names, and arming one in processes that run already."""

from __future__ import annotations

from pathlib import Path

from runtime.shared import failpoints

REPOSITORY = Path(__file__).resolve().parents[2]


def instants(*folders: str) -> set[str]:
    """Every failpoint that stands in the runtime's code and begins with one of the words."""
    names: set[str] = set()
    for path in sorted((REPOSITORY / "runtime").rglob("*.py")):
        for part in path.read_text().split('failpoints.failpoint("')[1:]:
            names.add(part.partition('"')[0])
    return {name for name in names if name.partition(".")[0] in folders}


def arm(file: Path, text: str) -> str:
    """Arm an instant of processes that run already; the value of the variable they were started with."""
    failpoints.parse(text)
    partial = file.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(file)
    return f"file:{file}"
