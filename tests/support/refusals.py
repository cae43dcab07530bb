"""Bad input, refused before anything starts: `check(Refused("--modle x", 2, what, why, hint), place)`.

A refusal is an exit code and three lines that say what, why, and what to do; each is asked for through the
real entry, and nothing may be left of it: no record, no folder, no process. Tables of them read like the
documentation: `tests/unit/test_refusals_*.py`. Neighbours: `typed.py` is the entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from launcher.backends import environments
from launcher.base.home import Home
from launcher.records.records import RecordStore
from tests.support.typed import Typed


class Place:
    """A project folder and a home, and what a user may have put there."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = root / "project"
        self.home = root / "home"
        self.typed = Typed(self.folder, self.home)
        self.patch = patch

    def write(self, name: str, text: str, mode: int = 0o600) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)

    def user_config(self, text: str) -> None:
        self.home.mkdir(exist_ok=True)
        (self.home / "config.toml").write_text(text)

    def live_run(self, name: str) -> None:
        RecordStore(Home.find({"LAUNCH_HOME": str(self.home)})).create(name=name)

    def everything(self) -> set[Path]:
        """All that lies in the home."""
        return set(self.home.rglob("*"))


@dataclass(frozen=True)
class Refused:
    """One line of a table: `done` is what the user did before, `typed` the words behind `launch`."""

    typed: str
    code: int
    what: str
    why: str
    hint: str
    done: Callable[[Place], None] = lambda place: None
    environ: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.typed


def check(refused: Refused, place: Place) -> None:
    refused.done(place)
    before, children = place.everything(), set(psutil.Process().children())
    done = place.typed(*refused.typed.split(), **refused.environ)
    assert done.returncode == refused.code, done.stderr
    assert done.stdout == "", done.stdout
    what, why, hint = done.stderr.splitlines()
    assert what.startswith("Error: ") and refused.what in what, done.stderr
    assert why.startswith("  ") and refused.why in why, done.stderr
    assert hint.startswith("Hint: ") and refused.hint in hint, done.stderr
    assert place.everything() == before, "no record, no folder"
    assert set(psutil.Process().children()) <= children, "no process"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    # Whatever is typed here is refused before the network would be asked.
    monkeypatch.setattr(environments, "why_unreachable", lambda variant: pytest.fail("asked the network"))
    return Place(tmp_path, monkeypatch)
