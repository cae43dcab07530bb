"""What a machine or a model wrote is shown on the terminal and never acts on it, by every way it gets there.

The bytes are hostile ones: the clipboard, the title, a cleared screen, another screen, a moved cursor, keys
that mean something else, C1 controls, text that runs backwards (launcher/base/sanitize.py).
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.base import sanitize
from launcher.base.errors import JobFailed
from launcher.base.home import Home
from launcher.client.dropped_samples import DroppedSampleWarnings
from launcher.client.dspy.report import Journal
from launcher.client.error_display import install_excepthook
from launcher.client.failures import StepFailed
from launcher.client.schema import StepCounts, StepStatus
from launcher.console import sanitized_command
from launcher.console.output import LiveStatus, Output
from launcher.records.records import RecordStore
from tests.support.own_sshd import OwnSshd
from tests.support.typed import Typed

# Each does something in one terminal or another; what is beside it is what must be seen of it.
ACTS = {
    "\x1b]52;c;ZXZpbA==\x07": r"\x1b]52;c;ZXZpbA==\x07",
    "\x1b]0;title\x1b\\": r"\x1b]0;title\x1b",
    "\x1b[2J\x1b[1;1H": r"\x1b[2J\x1b[1;1H",
    "\x1b[?1049h": r"\x1b[?1049h",
    "\x1b[>4;2m": r"\x1b[>4;2m",
    "\x1b[8m": "",
    "\x1bc\x1bP+q\x0e": r"\x1bc\x1bP+q\x0e",
    "\x9b2J\x9d52;c;x\x9c\x85": r"\x9b2J\x9d52;c;x\x9c\x85",
    "\x08\x7f\x0b\x0c": r"\x08\x7f\x0b\x0c",
    "\u202ereversed\u2066": r"\u202ereversed\u2066",
    "\udc9b": r"\udc9b",
}
HOSTILE = "before " + " ".join(ACTS) + " after"
RED, PLAIN = "\x1b[31m", "\x1b[0m"
_ACTING = re.compile(
    r"\x1b(?!\[[0-9;]*m|\[2K|\[r|\[\d+;\d+[rH]|\[1A|7|8)|[\x00-\x06\x07\x08\x0b-\x0c\x0e-\x1a\x7f-\x9f\u202a-\u202e]"
    r"|\x1b\[2J|\x1b\[1;1H|\x1b\[8m"
)


def _is_harmless(said: str, *, seen: bool = True) -> None:
    """Nothing of it acts, and it is seen that it was there. A live line of ours moves the cursor itself."""
    found = _ACTING.search(said)
    assert found is None, (found, said)
    if seen:
        assert r"\x1b]52;c;ZXZpbA==\x07" in said and r"\x9b2J" in said, said


def test_p09_each_that_acts_is_seen_and_the_text_of_every_language_is_as_it_was() -> None:
    for given, seen in ACTS.items():
        assert sanitize.plain_text(f"<{given}>").startswith(f"<{seen}"), given
        _is_harmless(sanitize.plain_text(given) + sanitize.one_line(given), seen=False)
        _is_harmless(sanitize.LogStream().feed(f"{given} "), seen=False)
    kept = "naïve « thé »\u00a0 日本語 العربية עברית 👩‍🔬\tand\na line\n"
    assert sanitize.plain_text(kept) == kept == sanitize.LogStream().feed(kept)
    assert sanitize.one_line("a\nb\tc") == r"a\nb\tc"
    assert sanitize.plain_text("50%\r100%\r\nend\r\r\n") == "50%\n100%\nend\n"


def test_p09_a_log_keeps_its_colours_and_they_go_no_further() -> None:
    for colour in (RED, "\x1b[m", "\x1b[1;38;5;8m", "\x1b[38;2;8;8;8m", "\x1b[4:3m", PLAIN):
        assert sanitize.LogStream().feed(f"{colour}text") == f"{colour}text"
        assert sanitize.plain_text(f"{colour}text") == sanitize.one_line(f"{colour}text") == "text"
    for concealing in ("\x1b[8m", "\x1b[1;8m", "\x1b[38;5;1;8m"):
        assert sanitize.LogStream().feed(f"{concealing}text") == repr(concealing)[1:-1] + "text"
    log = sanitize.LogStream()
    assert log.feed(f"{RED}text") + log.end() == f"{RED}text{PLAIN}"
    log = sanitize.LogStream()
    assert log.feed(f"{RED}text{PLAIN}") + log.end() == f"{RED}text{PLAIN}"


def test_p09_a_log_in_pieces_is_as_in_one() -> None:
    given = f"{HOSTILE}\r\n{RED}red\x1b[0;1mbold{PLAIN}\rover\r\n\x1b[3"
    whole = sanitize.LogStream()
    expected = whole.feed(given) + whole.end()
    _is_harmless(expected)
    for size in (1, 2, 3, 7):
        log = sanitize.LogStream()
        made = [log.feed(given[at : at + size]) for at in range(0, len(given), size)]
        assert "".join(made) + log.end() == expected, size


# ------------------------------------------------------------------ the seven ways


def _phase(output: Output) -> None:
    with output.phase("setup") as progress:
        progress(HOSTILE)
    with output.busy("copying", HOSTILE) as progress:
        progress(HOSTILE)
    output.note(HOSTILE)


def _traceback(output: Output) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        output.traceback(show=True)


SAID: dict[str, Callable[[Output], None]] = {
    "a note": lambda output: output.note(HOSTILE),
    "a warning of the runtime's": lambda output: output.warn(HOSTILE),
    "an event": lambda output: output.event("served", HOSTILE, detail=HOSTILE),
    "a phase's progress": _phase,
    "a live line": lambda output: output.update_status(LiveStatus(HOSTILE, 1.0, 0.0, trouble=HOSTILE)),
    "an error": lambda output: output.error(JobFailed(HOSTILE, f"{HOSTILE}\n{HOSTILE}", HOSTILE)),
    "what a machine said last": lambda output: output.error(JobFailed("x", last_lines=[HOSTILE])),
    "a traceback": _traceback,
    "an answer": lambda output: output.result({"said": HOSTILE}, HOSTILE),
}


@pytest.mark.parametrize("way", SAID)
def test_p09_one_what_launch_says_of_a_machine(way: str) -> None:
    said = io.StringIO()
    SAID[way](Output(stdout=said, stderr=said, environ={"FORCE_COLOR": "1"}))
    _is_harmless(said.getvalue())


@pytest.mark.parametrize("way", SAID)
def test_p09_two_what_launch_says_on_a_terminal_beside_its_live_line(way: str) -> None:
    screen, terminal = pty.openpty()
    with os.fdopen(terminal, "w", encoding="utf-8") as stream:
        output = Output(stdout=stream, stderr=stream, environ={"TERM": "xterm"})
        SAID[way](output)
        stream.flush()
        shown = _read(screen)
    os.close(screen)
    # A live line is cut to the terminal's width.
    _is_harmless(shown, seen=way != "a live line")


@pytest.mark.parametrize("way", SAID)
def test_p09_three_what_launch_says_in_json_and_it_means_the_same(way: str) -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    SAID[way](Output(as_json=True, stdout=stdout, stderr=stderr, environ={}))
    assert not _ACTING.search(stdout.getvalue() + stderr.getvalue())
    objects = [json.loads(line) for line in stdout.getvalue().splitlines()]
    if way == "an answer":
        assert objects == [{"schema": 1, "said": HOSTILE}]


@pytest.mark.parametrize("which", ["launch", "program", "trainer"])
def test_p09_four_a_log_that_is_kept_here(which: str, tmp_path: Path) -> None:
    store, typed = RecordStore(Home.find({"LAUNCH_HOME": str(tmp_path / "home")})), _typed(tmp_path)
    folder = store.folder(store.create(name="dev").id)
    path = folder / "machine" / "logs" / "trainer.log" if which == "trainer" else folder / f"{which}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(f"{HOSTILE}\n{RED}red".encode(errors="surrogateescape"))
    done = typed("logs", "dev", "--which", which)
    _is_harmless(done.stdout)
    assert done.stdout.endswith(f"{RED}red{PLAIN}")


def test_p09_five_the_fields_of_a_status(tmp_path: Path) -> None:
    store, typed = RecordStore(Home.find({"LAUNCH_HOME": str(tmp_path / "home")})), _typed(tmp_path)
    hostile = HOSTILE.encode(errors="replace").decode()  # a record is UTF-8
    record = store.create(name="dev", command=("python", "my.py"))
    proof = {"verified": False, "detail": hostile}
    said = {"troubles": (hostile,), "reason": hostile, "why": hostile, "unpulled": hostile, "proof": proof}
    store.update(record.id, state="unverified", **said)
    shown = typed("status", "dev").stdout
    _is_harmless(shown)
    assert shown.count(r"\x1b]52") == 5
    assert not _ACTING.search(typed("status", "dev", "--json").stdout)


@pytest.mark.process
def test_p09_six_a_log_on_the_machine(tmp_path: Path) -> None:
    sshd = OwnSshd(tmp_path / "sshd")
    store = RecordStore(Home.find({"LAUNCH_HOME": str(tmp_path / "home")}))
    log = sshd.logs(sshd.rented(store, "dev")) / "trainer.log"
    log.write_bytes(f"{HOSTILE}\n{RED}red".encode(errors="surrogateescape"))
    done = _typed(tmp_path)("logs", "dev", "--which", "trainer")
    _is_harmless(done.stdout)
    assert done.stdout.endswith(f"{RED}red{PLAIN}")


@pytest.mark.process
def test_p09_seven_a_command_on_the_machine_is_shown_on_a_terminal(tmp_path: Path) -> None:
    sshd = OwnSshd(tmp_path / "sshd")
    store = RecordStore(Home.find({"LAUNCH_HOME": str(tmp_path / "home")}))
    record = sshd.rented(store, "dev")
    (sshd.home / "slipway" / record.id / "python").write_text(sys.executable)
    (sshd.home / "slipway-code").mkdir()
    (sshd.home / "slipway-code" / "evil").write_bytes(HOSTILE.encode(errors="surrogateescape"))
    pid, screen = pty.fork()
    if pid == 0:
        os.environ["LAUNCH_HOME"] = str(tmp_path / "home")
        words = ["-m", "launcher.cli.main", "exec", "dev", "--", "sh", "-c", "cat evil; cat evil >&2; exit 3"]
        os.execv(sys.executable, [sys.executable, *words])
    shown = _read_all(screen)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 6, shown
    _is_harmless(shown)
    assert shown.count(r"\x1b]52") == 2 and "Error: the command ended with exit code 3" in shown


@pytest.mark.process
def test_p09_what_is_passed_on_to_a_file_is_as_it_was(tmp_path: Path) -> None:
    evil = HOSTILE.encode(errors="surrogateescape") + bytes(range(256))
    (tmp_path / "evil").write_bytes(evil)
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        words = ["sh", "-c", f"cat {tmp_path}/evil; cat {tmp_path}/evil >&2; exit 7"]
        assert sanitized_command.run(words, out.fileno(), err.fileno()) == 7
    assert (tmp_path / "out").read_bytes() == (tmp_path / "err").read_bytes() == evil


@pytest.mark.process
def test_p09_what_a_command_left_behind_is_not_waited_for(tmp_path: Path) -> None:
    """As ssh's own master process, which holds its output open."""
    screen, terminal = pty.openpty()
    left = tmp_path / "left"
    words = ["sh", "-c", f"sleep 600 & echo $! > {left}; printf done"]
    assert sanitized_command.run(words, terminal, terminal) == 0
    os.kill(int(left.read_text()), 9)
    assert _read(screen, terminal) == "done"


def test_p09_what_a_training_says_of_a_machine_and_a_model() -> None:
    said = io.StringIO()
    Journal(None, 1, said).note(HOSTILE)
    _is_harmless(said.getvalue())


def test_p09_what_a_program_is_told_of_its_run(capsys: pytest.CaptureFixture[str]) -> None:
    counts = StepCounts(samples=1, dropped={HOSTILE: 1})
    DroppedSampleWarnings().report_step(StepStatus(id=1, key="k", state="published", counts=counts))
    _is_harmless(capsys.readouterr().err)
    failed = StepStatus(id=1, key="k", state="failed", error=f"{HOSTILE}\nand more")
    _is_harmless(f"{failed!r}{failed}")
    assert "\n" not in repr(failed)


def test_p09_the_last_words_of_a_program_wherever_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder was removed meanwhile: where the error came from is said all the same."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    install_excepthook()
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    try:
        raise StepFailed(HOSTILE, 1, why=HOSTILE, hint="look") from ValueError(HOSTILE)
    except StepFailed as error:
        sys.excepthook(StepFailed, error, error.__traceback__)
    said = capsys.readouterr().err
    _is_harmless(said)
    assert "\nHint: look\n" in said and f"  at {__file__}:" in said


def _typed(tmp_path: Path) -> Typed:
    return Typed(tmp_path / "project", tmp_path / "home")


def _read(screen: int, terminal: int | None = None) -> str:
    """What is on its way to the screen by now."""
    found = b""
    os.set_blocking(screen, False)
    while True:
        try:
            found += os.read(screen, 1 << 16)
        except BlockingIOError:
            break
    if terminal is not None:
        os.close(terminal)
        os.close(screen)
    return found.decode(errors="surrogateescape")


def _read_all(screen: int) -> str:
    """Until nobody holds the terminal any more."""
    found = b""
    while True:
        try:
            piece = os.read(screen, 1 << 16)
        except OSError:
            piece = b""
        if not piece:
            os.close(screen)
            return found.decode(errors="surrogateescape")
        found += piece
