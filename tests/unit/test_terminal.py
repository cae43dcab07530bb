"""The live line: on a real pseudo-terminal, beside another writer, and nowhere else."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import struct
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest

from launcher.base.errors import JobFailed
from launcher.console.output import LiveStatus, Output
from launcher.console.terminal import StatusLine

ROWS, COLUMNS = 24, 60


class Terminal:
    """Our end of a pseudo-terminal, and the stream a program would write to."""

    def __init__(self) -> None:
        self.master, slave = pty.openpty()
        self.resize(ROWS, COLUMNS)
        self.stream: TextIO = os.fdopen(slave, "w")

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self) -> str:
        """What was written since the last read: everything up to a mark that is written now."""
        os.write(self.stream.fileno(), b"\0")
        found = b""
        while not found.endswith(b"\0"):
            found += os.read(self.master, 1 << 16)
        return found[:-1].decode()

    def close(self) -> None:
        self.stream.close()
        os.close(self.master)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


def test_a_pinned_line_leaves_the_programs_rows_alone_and_gives_its_own_back(terminal: Terminal) -> None:
    line = StatusLine(terminal.stream)
    line.pin()
    assert "\x1b[1;23r" in terminal.read(), "rows 1 to 23 scroll, row 24 is ours"
    line.draw("up 3 s")
    drawn = terminal.read()
    assert drawn.startswith("\x1b7") and drawn.endswith("\x1b8"), "the cursor is where the program left it"
    assert "\x1b[24;1H" in drawn and "up 3 s" in drawn
    line.clear()
    assert "\x1b[r" in terminal.read(), "all rows scroll again"


def test_a_pinned_line_follows_a_resized_terminal(terminal: Terminal) -> None:
    line = StatusLine(terminal.stream)
    line.pin()
    terminal.resize(40, COLUMNS)
    terminal.read()
    line.draw("up")
    assert "\x1b[1;39r\x1b[40;1H" in terminal.read()


def test_a_small_terminal_keeps_all_its_rows(terminal: Terminal) -> None:
    terminal.resize(4, COLUMNS)
    line = StatusLine(terminal.stream)
    line.pin()
    line.write("a line")
    assert "\x1b[1;" not in terminal.read()


def test_a_line_never_wraps(terminal: Terminal) -> None:
    line = StatusLine(terminal.stream)
    line.draw("x" * 200, "\x1b[2m")
    shown = terminal.read().replace("\x1b[2m", "").replace("\x1b[0m", "").replace("\r\x1b[2K", "")
    assert len(shown) < COLUMNS
    assert shown.endswith("…")


def test_a_terminal_that_does_not_know_its_size_is_a_usual_one(terminal: Terminal) -> None:
    terminal.resize(0, 0)
    line = StatusLine(terminal.stream)
    line.draw("")
    line.write("done one")
    assert "…" not in terminal.read()
    line.draw("x" * 200)
    assert terminal.read().count("x") == 78


def test_a_lasting_line_goes_above_the_status_line(terminal: Terminal) -> None:
    line = StatusLine(terminal.stream)
    line.draw("working")
    line.write("done one")
    assert terminal.read().endswith("\r\x1b[2Kdone one\r\nworking")


def live(step: int) -> LiveStatus:
    return LiveStatus(
        "dev", 192.0, 0.0, budget=40.0, step=step, reward=0.5, tunnel_ms=2.4, lease_left_seconds=870.0
    )


def test_the_live_line_says_what_was_promised() -> None:
    assert (
        live(7).line()
        == "dev · up 3m 12s · $0.00 of $40.00 · step 7 · reward 0.5 · tunnel 2 ms · lease 14m left"
    )


def test_a_terminal_gets_the_live_line_and_a_dumb_or_plain_one_does_not(terminal: Terminal) -> None:
    Output(stderr=terminal.stream, environ={"TERM": "xterm"}).update_status(live(1))
    assert "\x1b[2K" in terminal.read()
    for plain, term in ((True, "xterm"), (False, "dumb")):
        Output(stderr=terminal.stream, plain=plain, environ={"TERM": term, "NO_COLOR": "1"}).update_status(
            live(1)
        )
        assert terminal.read() == live(1).line() + "\r\n"


def test_without_a_terminal_a_step_is_one_line_and_standing_still_is_none() -> None:
    stderr = io.StringIO()
    output = Output(stderr=stderr, environ={})
    for step in (1, 1, 1, 2, 2):
        output.update_status(live(step))
    assert stderr.getvalue().splitlines() == [live(1).line(), live(2).line()]


def test_without_a_terminal_a_phase_is_one_plain_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 1.0)
    stderr = io.StringIO()
    output = Output(stderr=stderr, environ={})
    with output.phase("setup", usual_seconds=70.0) as progress:
        progress("installing")
    assert stderr.getvalue() == "  setup     0.0 s (usually 1m 10s)\n"


def test_a_secret_is_shown_by_nothing_that_prints() -> None:
    from launcher.base.errors import LaunchError
    from launcher.base.log import REDACTOR

    REDACTOR.hide(["hunter2hunter2"])
    stdout, stderr = io.StringIO(), io.StringIO()
    output = Output(as_json=True, stdout=stdout, stderr=stderr, environ={})
    output.event("note", text="with hunter2hunter2")
    output.error(LaunchError("hunter2hunter2", "why hunter2hunter2", "hint hunter2hunter2"))
    assert "hunter2" not in stdout.getvalue() + stderr.getvalue()


def test_what_failed_is_shown_with_what_it_said_last() -> None:
    stderr, stdout = io.StringIO(), io.StringIO()
    failed = JobFailed("setup failed", "no wheel", "launch logs demo", last_lines=["asking", "no wheel"])
    Output(plain=True, stderr=stderr, environ={}).error(failed)
    assert stderr.getvalue().splitlines()[:5] == [
        "  | asking",
        "  | no wheel",
        "Error: setup failed",
        "  no wheel",
        "Hint: launch logs demo",
    ]
    Output(as_json=True, stdout=stdout, stderr=io.StringIO(), environ={}).error(failed)
    assert json.loads(stdout.getvalue())["error"]["last_lines"] == ["asking", "no wheel"]
