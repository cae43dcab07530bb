"""A program that failed before its first step, on a terminal: mended and run again on the same endpoint, or
ended by a key, by nobody, by a limit or by a signal (launcher/run/program_retry.py).

The terminals are real ones. `launch` is the real one on a small runtime; where a clock is put on, the machine
is in this process.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.base import clock
from launcher.base.errors import JobFailed
from launcher.run import program_retry
from tests.support.environment import REPOSITORY
from tests.support.lived import Lived, Lives
from tests.support.pretend_machine import PretendMachine
from tests.support.terminals import Terminal
from tests.support.waiting import wait_until

pytestmark = pytest.mark.process

ASKS = "Enter runs it again on the same endpoint"
NOBODY = "--name dev and no program holds an endpoint"
_SEEN = """import json, os
with open("seen.jsonl", "a") as file:
    told = {name: os.environ[name] for name in ("LAUNCH_BASE_URL", "LAUNCH_API_KEY", "LAUNCH_RUN_ID")}
    file.write(json.dumps(told | {"terminal": os.isatty(0) and os.isatty(1)}) + "\\n")
"""
WRONG, RIGHT = f"{_SEEN}undefined_name\n", f"{_SEEN}print('mended')\n"
_STEP = "from launcher.client import connect, group\nconnect().step([group('g', {'r': 1.0})], key='k')\n"
_LAUNCH = (sys.executable, "-m", "tests.support.small_launch")
_PROGRAM = ("--", sys.executable, "my.py")


class Typed(Terminal):
    """`launch -- python my.py`, typed in a terminal of its own; `my.py` is in `folder`."""

    def __init__(self, folder: Path, program: str, *options: str, **environ: str) -> None:
        self.folder = folder
        self.put(program)
        words, given = [*_LAUNCH, *options, *_PROGRAM], {**_environ(folder), **environ}
        self.pid, screen = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execve(sys.executable, words, given)
        super().__init__(screen)

    def put(self, program: str) -> None:
        fresh = self.folder / "fresh.py"
        fresh.write_text(program)
        fresh.rename(self.folder / "my.py")

    def ends(self) -> int:
        """Its exit code."""
        code: list[int] = []

        def over() -> bool:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            code.extend([os.waitstatus_to_exitcode(status)] if pid else [])
            return bool(code)

        wait_until(over, what=lambda: f"its end:\n{self.text}")
        return code[0]

    @property
    def run(self) -> Path:
        (found,) = (self.folder / "home" / "runs").glob("slip-*")
        return found

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.run / "record.json").read_text())

    @property
    def seen(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "seen.jsonl").read_text().splitlines()]


def _environ(folder: Path) -> dict[str, str]:
    """Of somebody who has set nothing of ours, and no CI."""
    kept = {name: it for name, it in os.environ.items() if name != "CI" and not name.startswith("LAUNCH")}
    ours = {"LAUNCH_HOME": str(folder / "home"), "PYTHONPATH": str(REPOSITORY), "TERM": "xterm"}
    return kept | ours


@pytest.fixture
def typed(tmp_path: Path) -> Iterator[Callable[..., Typed]]:
    """Whatever is left of it ends with the test."""
    made: list[Typed] = []

    def make(program: str, *options: str, **environ: str) -> Typed:
        made.append(Typed(tmp_path, program, *options, **environ))
        return made[-1]

    yield make
    for one in made:
        try:
            os.kill(one.pid, signal.SIGKILL)
            os.waitpid(one.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def test_s03_a_name_error_is_mended_and_run_again_on_the_same_endpoint(typed: Callable[..., Typed]) -> None:
    """Wrong twice, and then right; each time it is told the same endpoint, and it has its terminal."""
    run = typed(WRONG)
    for times in (1, 2):
        run.shows(ASKS, times)
        assert run.text.count("NameError") >= times
        if times == 2:
            run.put(RIGHT)
        run.type("\r")
        run.shows("running it again", times)
    assert run.ends() == 0, run.text
    run.shows("down: verified")
    assert len(run.seen) == 3 and all(one == run.seen[0] for one in run.seen), run.seen
    assert run.seen[0]["terminal"]
    assert run.text.count("ready: http") == 1
    assert run.record["state"] == "verified" and run.record["exit_code"] == 0
    log = (run.run / "launch.log").read_text()
    assert log.count("serve begins") == log.count("arm begins") == 1
    kept = (run.run / "program.log").read_text()
    assert kept.count("NameError") == 2 and kept.endswith("mended\n")


def _hang_up(run: Typed) -> None:
    run.close()


ENDS: dict[str, tuple[Callable[[Typed], None], int, str]] = {
    "q": (lambda run: run.type("xq"), 6, "the program ended with exit code 1"),
    "Ctrl-C": (lambda run: run.type("\x03"), 130, "interrupted by SIGINT"),
    "TERM": (lambda run: os.kill(run.pid, signal.SIGTERM), 143, "interrupted by SIGTERM"),
    "closed": (_hang_up, 129, "interrupted by SIGHUP"),
}


@pytest.mark.parametrize("ended", ENDS)
def test_s03_a_key_or_a_signal_ends_it_with_proof_and_the_terminal_is_as_it_was(
    ended: str, typed: Callable[..., Typed]
) -> None:
    act, code, reason = ENDS[ended]
    run = typed(WRONG)
    before = termios.tcgetattr(run.screen)
    run.shows(ASKS)
    act(run)
    assert run.ends() == code, run.text
    assert run.record["state"] == "verified" and run.record["reason"] == reason
    assert len(run.seen) == 1
    if ended != "closed":
        assert termios.tcgetattr(run.screen) == before
        run.shows("down: verified")


NOT_ASKED: dict[str, tuple[tuple[str, ...], dict[str, str], str, str]] = {
    "-y": (("--yes",), {}, WRONG, NOBODY),
    "LAUNCH_YES": ((), {"LAUNCH_YES": "1"}, WRONG, NOBODY),
    "CI": ((), {"CI": "true"}, WRONG, NOBODY),
    "after its first step": ((), {}, f"{_SEEN}{_STEP}undefined_name\n", "Hint: launch logs"),
}


@pytest.mark.parametrize("why", NOT_ASKED)
def test_s03_where_nobody_answers_or_a_step_is_committed_a_failed_program_ends_its_run(
    why: str, typed: Callable[..., Typed]
) -> None:
    options, environ, program, hint = NOT_ASKED[why]
    run = typed(program, *options, **environ)
    run.shows("down: verified")
    assert run.ends() == 6, run.text
    assert ASKS not in run.text and hint in run.text
    assert (NOBODY in run.text) == (program == WRONG)


def test_s03_without_a_terminal_nobody_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(WRONG)
    done = subprocess.run(
        [*_LAUNCH, *_PROGRAM],
        cwd=tmp_path,
        env=_environ(tmp_path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 6 and ASKS not in done.stderr and NOBODY in done.stderr


# ------------------------------------------------------------------ the clock is put on


Act = Callable[[Terminal, Callable[[float], None]], None]


def _waits(live: Lives, patch: pytest.MonkeyPatch, act: Act, **flags: Any) -> tuple[Lived, Terminal]:
    """A run whose program fails at once; `act` when somebody is waited for, and may put the clock on."""
    screen, theirs = pty.openpty()
    terminal, slept = Terminal(screen), [0.0]
    real = clock.boot_seconds
    patch.setattr(clock, "boot_seconds", lambda: real() + slept[0])
    patch.delenv("CI", raising=False)

    def put_on(seconds: float) -> None:
        slept[0] += seconds

    def wait() -> None:
        terminal.shows("Enter: run it again")
        act(terminal, put_on)

    acting = threading.Thread(target=wait, daemon=True)
    acting.start()
    with os.fdopen(theirs, "w") as stream, os.fdopen(os.dup(theirs)) as keyboard:
        patch.setattr(sys, "stdin", keyboard)
        patch.setattr(sys, "stderr", stream)
        command = (sys.executable, "-c", "undefined_name")
        lived = live(command, flags=flags, prepare=_without_a_step, terminal=stream)
        terminal.shows("down: verified")
    assert ASKS in terminal.text
    acting.join()
    return lived, terminal


def _without_a_step(machine: PretendMachine) -> None:
    machine.step = 0


def test_s03_without_a_key_it_ends_by_itself_after_idle_and_is_down(
    live: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    lived, terminal = _waits(live, monkeypatch, lambda terminal, put_on: put_on(121), idle="2m")
    assert lived.code == 6, terminal.text
    assert lived.machine.calls.count("serve") == lived.machine.calls.count("down") == 1
    assert lived.record.state == "verified" and lived.record.exit_code == 1


def test_s03_a_key_says_that_somebody_is_there(live: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(terminal: Terminal, put_on: Callable[[float], None]) -> None:
        for _ in range(3):
            put_on(100)
            typed_at = len(terminal.text)
            terminal.type("x")
            terminal.shows("q: end · 2m", since=typed_at)
        put_on(121)

    lived, terminal = _waits(live, monkeypatch, act, idle="2m")
    assert lived.code == 6, terminal.text


def test_s03_the_deadline_ends_who_waits_for_a_key(live: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    lived, terminal = _waits(live, monkeypatch, lambda terminal, put_on: put_on(301), max="5m")
    assert lived.code == 7, terminal.text
    assert lived.record.state == "verified"


def test_s03_a_runtime_that_dies_meanwhile_ends_it(live: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    machines: list[PretendMachine] = []

    def remember(machine: PretendMachine) -> None:
        machines.append(machine)
        machine.step = 0

    monkeypatch.setattr(f"{__name__}._without_a_step", remember)

    def act(terminal: Terminal, put_on: Callable[[float], None]) -> None:
        machines[0].phase = "failed"

    lived, terminal = _waits(live, monkeypatch, act)
    assert lived.code == 6 and "the runtime failed" in terminal.text


def test_s03_a_runtime_that_failed_is_no_programs_failure() -> None:
    another = program_retry.ProgramRetry(*(None,) * 6)  # nothing is asked
    assert not another.wait_for_key(JobFailed("the runtime failed"))
