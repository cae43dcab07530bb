"""open_files.py: as many open files as the system gives, whatever it says, and never an error."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from launcher.backends.ssh.link import Link, SshHost
from runtime.shared import open_files

INFINITE = resource.RLIM_INFINITY


class System:
    """A system that lets the soft limit rise to `most`, and refuses more."""

    def __init__(self, soft: int, hard: int, most: int) -> None:
        self.limits = (soft, hard)
        self._most = most

    def getrlimit(self, _what: int) -> tuple[int, int]:
        return self.limits

    def setrlimit(self, _what: int, limits: tuple[int, int]) -> None:
        if limits[0] > self._most:
            raise ValueError("current limit exceeds maximum limit")
        self.limits = limits


@pytest.mark.parametrize(
    ("soft", "hard", "most", "then"),
    [
        (1024, 524288, 524288, open_files.WANTED),
        (1024, 4096, 4096, 4096),
        (256, INFINITE, 10240, 10240),  # a Mac
        (256, INFINITE, 300, 256),
        (65536, 65536, 65536, 65536),
        (INFINITE, INFINITE, 0, INFINITE),
    ],
)
def test_g31_the_limit_of_open_files_is_raised_as_far_as_it_goes(
    soft: int, hard: int, most: int, then: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = System(soft, hard, most)
    monkeypatch.setattr(resource, "getrlimit", system.getrlimit)
    monkeypatch.setattr(resource, "setrlimit", system.setrlimit)
    assert open_files.raise_limit() == then
    assert system.limits == (then, hard)


def test_g17_the_first_ssh_has_the_raised_limit_of_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process keeps the limit it was started with; ssh holds a descriptor for each request under way."""
    said: list[str] = []
    monkeypatch.setattr(open_files, "raise_limit", lambda: said.append("raised"))
    monkeypatch.setattr(Link, "_supervise", lambda self: said.append("ssh"))
    link = Link(SshHost("192.0.2.1", "u", tmp_path / "k", tmp_path / "h"), tmp_path / "s", "/there")
    link.start()
    link.close()
    assert said == ["raised", "ssh"]
