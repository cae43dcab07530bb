"""The live line: on a real pseudo-terminal, beside another writer, and nowhere else."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import json
import os
import pty
import shlex
import struct
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from launcher.base import layout
from launcher.base.errors import JobFailed, UsageError
from launcher.base.home import Home
from launcher.cli import run_outcome
from launcher.cli.main import main
from launcher.cli.usage_errors import VERBS
from launcher.client.dspy.report import Journal
from launcher.console.output import LiveStatus, Output
from launcher.console.terminal import StatusLine
from launcher.records.records import RecordStore
from tests.support.typed import Typed

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


@pytest.mark.parametrize(
    ("steps", "seconds_left", "shown"),
    [
        (None, None, "step 7 · "),  # a loop of the user's own
        (40, None, "step 7 of 40 · "),
        (40, 0.4, "step 7 of 40 · "),
        (40, 71.6, "step 7 of 40, about 1m 12s left · "),
        (40, 725.0, "step 7 of 40, about 12m left · "),
        (6, None, "step 7 · "),  # the optimizer's last was step 6
    ],
)
def test_the_live_line_says_how_long_the_steps_take_that_are_left(
    steps: int | None, seconds_left: float | None, shown: str
) -> None:
    line = dataclasses.replace(live(7), steps=steps, seconds_left=seconds_left).line()
    assert f"$40.00 · {shown}reward 0.5" in line


def test_a_terminal_gets_the_live_line_and_a_dumb_or_plain_one_does_not(terminal: Terminal) -> None:
    Output(stderr=terminal.stream, environ={"TERM": "xterm"}).update_status(live(1))
    assert "\x1b[2K" in terminal.read()
    for plain, term in ((True, "xterm"), (False, "dumb")):
        Output(stderr=terminal.stream, plain=plain, environ={"TERM": term, "NO_COLOR": "1"}).update_status(
            live(1)
        )
        assert terminal.read().split() == live(1).line().split(), "in lines of the terminal's width"


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


# ------------------------------------------------------------------ the terminal's width


def breaks_between_words(shown: str, source: str, columns: int) -> None:
    """No line is wider than the terminal, and each word of the source is whole."""
    assert shown.split() == source.split()
    assert [line for line in shown.splitlines() if len(line) > columns and " " in line.strip()] == []


@pytest.mark.process
@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("verb", ["plan", "plan --gpus H100:4 --model Qwen/Qwen3-8B", "doctor", "status"])
def test_n06_no_answer_of_a_verb_breaks_inside_a_word(
    terminal: Terminal, tmp_path: Path, verb: str, columns: int
) -> None:
    typed = Typed(tmp_path / "project", tmp_path / "home")
    store = RecordStore(Home.find({"LAUNCH_HOME": str(tmp_path / "home")}))
    for name in ("first", "the-second"):
        run = store.create(name=name, details={"plan": {"model": "Qwen/Qwen2.5-7B-Instruct"}})
        store.update(run.id, state="unverified", exit_code=1, ended_by="gc", ended=run.created + 3)
    source = typed(*verb.split()).stdout
    terminal.resize(ROWS, columns)
    output = Output(stdout=terminal.stream, environ={})
    if verb == "status":
        rows = [run_outcome.HEADING, *(run_outcome.row(one, store) for one in store.list())]
        output.result({}, layout.table(rows, output.width))
        shown = terminal.read().replace("\r\n", "\n")
        source = " ".join(word for row in rows[1:] for word in named_cells(row))
    else:
        output.result({}, source)
        shown = terminal.read().replace("\r\n", "\n")
    breaks_between_words(shown, source, columns)


def named_cells(row: list[str]) -> list[str]:
    """A row of a table as a block has it."""
    named = zip(run_outcome.HEADING[1:], row[1:], strict=True)
    return [row[0], *(word for pair in named for word in pair)]


@pytest.mark.parametrize("columns", [80, 60])
def test_n06_the_help_of_no_verb_breaks_inside_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    for words in ([], *([verb] for verb in VERBS)):
        main([*words, "--help"])
        source = capsys.readouterr().out
        with monkeypatch.context() as patched:
            patched.setattr(layout, "terminal_width", lambda stream: columns)
            main([*words, "--help"])
        breaks_between_words(capsys.readouterr().out, source, columns)


@pytest.mark.parametrize("columns", [80, 60])
def test_n06_the_line_of_a_step_breaks_between_words(terminal: Terminal, columns: int) -> None:
    terminal.resize(ROWS, columns)
    parts = [
        "step 3/40",
        "reward 0.125 ±0.031",
        "parsed 100%",
        "trained 64 of 64",
        "8.1 s (rollouts 6.0)",
    ] * 2
    Journal(None, 40, terminal.stream).note(" · ".join(parts))
    shown = terminal.read().replace("\r\n", "\n")
    breaks_between_words(shown, f"grpo: {' · '.join(parts)}", columns)


@pytest.mark.parametrize("columns", [80, 60])
def test_n06_an_error_and_the_live_line_break_between_words_and_a_hint_can_be_pasted(
    terminal: Terminal, columns: int
) -> None:
    terminal.resize(ROWS, columns)
    command = "launch plan --model Qwen/Qwen2.5-7B-Instruct --gpus H100:4 --set 'a=b c' --infra aws,lambda"
    why = "whether the model fits is not known: its config.json is neither here nor in the table of models"
    output = Output(stderr=terminal.stream, environ={"NO_COLOR": "1"}, plain=True)
    output.error(UsageError("a model with a rather long name does not fit " * 3, why, f"{command}  # or not"))
    shown = terminal.read().replace("\r\n", "\n")
    breaks_between_words(shown.replace(" \\\n", "\n"), shown.replace(" \\\n", "\n"), columns)
    assert max(map(len, shown.splitlines())) <= columns
    pasted = shown.partition("Hint: ")[2].replace("\\\n", "")  # as a shell joins them
    assert shlex.split(pasted, comments=True) == shlex.split(command)
    StatusLine(terminal.stream).draw(" · ".join(["reward 0.123", "tunnel 12 ms"] * 5))
    drawn = terminal.read().removeprefix("\r\x1b[2K")
    assert drawn.endswith(" …") and len(drawn) <= columns
    assert set(drawn.split()) <= {"reward", "0.123", "tunnel", "12", "ms", "·", "…"}
