"""What a program prints: live where it went before, and kept, bounded and without secrets (`launch logs`)."""

from __future__ import annotations

import os
import pty
import select
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.base import log, process_inspection, processes
from launcher.base.log import REDACTOR, rotated
from launcher.teardown import minder, program_log
from launcher.teardown.program_log import LineSplitter, ProgramLog
from launcher.teardown.program_streams import ProgramStreams
from tests.support.environment import PROGRAMS
from tests.support.lived import Lives
from tests.support.typed import Typed
from tests.support.waiting import wait_until


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(REDACTOR, "_secrets", set())
    value = "canary-" + uuid.uuid4().hex
    REDACTOR.hide([value])
    return value


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / program_log.FILE


def _said(kept: Path, *pieces: bytes) -> str:
    lines = LineSplitter(ProgramLog(kept))
    for piece in pieces:
        lines.feed(piece)
    lines.end()
    return kept.read_text()


def test_lines_are_kept_as_they_were_and_the_last_without_its_end(kept: Path) -> None:
    assert _said(kept, b"one\ntw", b"o\r\nthree \xc3", b"\xa9\nno end") == "one\ntwo\nthree é\nno end\n"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_a_progress_bar_is_kept_as_it_was_last(kept: Path) -> None:
    bars = [f"\r{number}%".encode() for number in range(101)]
    assert _said(kept, b"begin\n", *bars, b"\n", b"\r1%", b"\r2%") == "begin\n100%\n2%\n"


def test_g14_no_secret_is_kept_however_it_is_printed(kept: Path, secret: str) -> None:
    text = f"key={secret};\n".encode()
    key = "-----BEGIN KEY-----\n" + uuid.uuid4().hex
    REDACTOR.hide([key])
    long = b"x" * 70_000 + secret.encode() + b"y" * 70_000
    pieces = [bytes([byte]) for byte in text] + [long[at : at + 4096] for at in range(0, len(long), 4096)]
    said = _said(kept, *pieces, b"\n", *(f"{line}\n".encode() for line in key.splitlines()))
    assert said.startswith("key=***;\n") and said.count("***") == 4
    assert secret not in said and key.splitlines()[1] not in said
    assert len(said) > 140_000


def test_what_is_kept_is_bounded_and_its_newest_part_is_there(kept: Path) -> None:
    file = ProgramLog(kept, most_bytes=1000)
    for number in range(500):
        file.write(f"line {number}\n")
    assert kept.stat().st_size <= 1000 and rotated(kept).stat().st_size <= 1000
    assert (rotated(kept).read_text() + kept.read_text()).endswith("line 498\nline 499\n")
    assert sorted(path.name for path in kept.parent.iterdir()) == [kept.name, rotated(kept).name]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_the_launchers_own_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "MAX_BYTES", 2000)
    path = tmp_path / "launch.log"
    log.open_log(path)
    try:
        for number in range(200):
            log.LOGGER.info("line %d", number)
    finally:
        log.close_log()
    assert path.stat().st_size < 2200 and rotated(path).stat().st_size < 2200
    assert path.read_text().endswith("line 199\n") or rotated(path).read_text().endswith("line 199\n")
    assert {stat.S_IMODE(it.stat().st_mode) for it in (path, rotated(path))} == {0o600}
    assert len(list(tmp_path.iterdir())) == 2


def test_a_disk_that_refuses_costs_the_copy_and_not_the_program(tmp_path: Path) -> None:
    ProgramLog(tmp_path / "no such folder" / "program.log").write("a line\n")


# ----------------------------------------------------------------- a real command


@pytest.fixture
def run_id() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield name
    processes.end(lambda: process_inspection.with_variable(minder.COMMAND_VARIABLE, name), 0)


def _start(code: str, kept: Path, run_id: str, **environ: str) -> minder.Command:
    environ = {**os.environ, minder.COMMAND_VARIABLE: run_id, **environ}
    return minder.start([sys.executable, "-c", code], environ, kept.parent, 0.5, kept)


@pytest.mark.process
def test_what_a_program_prints_is_seen_and_kept(
    kept: Path, run_id: str, secret: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "import os, sys; print('out', flush=True); print(os.environ['KEY'], file=sys.stderr); sys.exit(3)"
    assert _start(code, kept, run_id, KEY=secret).wait(120) == 3
    seen = capfd.readouterr()
    assert (seen.out, seen.err) == ("out\n", f"{secret}\n"), "who runs it sees what it prints"
    assert sorted(kept.read_text().splitlines()) == ["***", "out"], "two streams, which nobody can order"


@pytest.mark.process
def test_g14_the_secrets_that_are_not_kept_are_in_no_command_line_environment_or_file(
    kept: Path, run_id: str, secret: str
) -> None:
    command = _start("import time; open('up', 'w').close(); time.sleep(600)", kept, run_id)
    wait_until((kept.parent / "up").exists, what="the command runs")
    assert command.process is not None
    place = Path(f"/proc/{command.process.pid}")
    assert secret.encode() not in (place / "cmdline").read_bytes() + (place / "environ").read_bytes()
    command.terminate()
    assert not [path for path in kept.parent.iterdir() if secret in path.read_text()]


@pytest.mark.process
def test_much_that_is_printed_at_the_very_end_is_all_there(
    kept: Path, run_id: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        _start("print('x' * 79 + chr(10), end='') or print(('y' * 79 + chr(10)) * 20000)", kept, run_id).wait(
            120
        )
        == 0
    )
    out = capfd.readouterr().out
    assert len(out) == 80 * 20001 + 1 and kept.read_text() == out


def test_g23_whoever_holds_the_output_open_and_is_silent_is_not_waited_for(
    kept: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As what a program left behind where the system adopts no orphans."""
    streams = ProgramStreams(ProgramLog(kept))
    assert streams.for_command[0] is not None
    left_behind = os.dup(streams.for_command[0])
    streams.begin()
    os.write(left_behind, b"a last word\n")
    wait_until(lambda: streams.done() and kept.exists(), what="nothing is on its way any more")
    assert capfd.readouterr().out == kept.read_text() == "a last word\n"
    os.close(left_behind)
    wait_until(lambda: select.select([streams.ended], [], [], 0)[0], what="its end")


@pytest.mark.process
def test_whoever_reads_it_no_more_ends_the_program_as_without_us(tmp_path: Path, run_id: str) -> None:
    program = [sys.executable, str(PROGRAMS / "unit" / "keep_output.py"), str(tmp_path / "program.log")]
    printing = "import time\nwhile True: print('line', flush=True); time.sleep(0.01)"
    process = subprocess.Popen(
        [*program, sys.executable, "-c", printing],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, minder.COMMAND_VARIABLE: run_id},
        cwd=tmp_path,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"line\n"
    process.stdout.close()
    assert process.wait(120) == 1, "BrokenPipeError"


@pytest.mark.process
def test_a_terminal_stays_one_for_the_program_with_its_size_and_its_ctrl_c(
    tmp_path: Path, run_id: str
) -> None:
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGWINCH, lambda *_: print('now', os.get_terminal_size(1), flush=True))\n"
        "print([os.isatty(one) for one in (0, 1, 2)], os.get_terminal_size(1), flush=True)\n"
        "try:\n    while True: time.sleep(0.02)\n"  # pause() misses a signal that comes just before it
        "except KeyboardInterrupt:\n    print('saved', flush=True); sys.exit(42)\n"
    )
    pid, screen = pty.fork()
    if pid == 0:
        os.environ[minder.COMMAND_VARIABLE] = run_id
        program = str(PROGRAMS / "unit" / "keep_output.py")
        os.execv(
            sys.executable,
            [sys.executable, program, str(tmp_path / "program.log"), sys.executable, "-c", code],
        )
    seen = ""

    def shown(text: str) -> bool:
        nonlocal seen
        if text not in seen and select.select([screen], [], [], 0)[0]:
            seen += os.read(screen, 4096).decode()
        return text in seen

    resize(screen, 33, 101)
    wait_until(lambda: shown("lines="), what="the program runs")
    assert "[True, True, True]" in seen
    resize(screen, 40, 120)
    wait_until(lambda: shown("now os.terminal_size(columns=120, lines=40)"), what="the size is another")
    os.write(screen, b"\x03")
    wait_until(lambda: shown("saved\r\n"), what="Ctrl-C came from the terminal")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
    os.close(screen)
    assert "saved\n" in (tmp_path / "program.log").read_text()


def resize(screen: int, lines: int, columns: int) -> None:
    import fcntl
    import struct
    import termios

    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


@pytest.mark.process
def test_a_program_that_is_told_to_end_says_its_last_words(
    kept: Path, run_id: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(print('saved') or 7))\n"
    code += "print('up', flush=True)\nwhile True: time.sleep(0.02)"
    environ = {**os.environ, minder.COMMAND_VARIABLE: run_id}
    command = minder.start([sys.executable, "-c", code], environ, kept.parent, 60.0, kept)
    wait_until(lambda: kept.exists() and "up" in kept.read_text(), what="the command runs")
    assert command.terminate() == 7
    assert capfd.readouterr().out == "up\nsaved\n" == kept.read_text()


@pytest.mark.process
def test_when_the_launcher_is_killed_a_kept_command_ends_as_well(tmp_path: Path, run_id: str) -> None:
    program = [sys.executable, str(PROGRAMS / "unit" / "keep_output.py"), str(tmp_path / "program.log")]
    process = subprocess.Popen(
        [*program, "sh", "-c", "touch ready; sleep 600"],
        cwd=tmp_path,
        env={**os.environ, minder.COMMAND_VARIABLE: run_id},
    )
    wait_until((tmp_path / "ready").exists, what="the command runs")
    process.send_signal(signal.SIGKILL)
    process.wait()
    begun = time.monotonic()
    wait_until(
        lambda: not process_inspection.with_variable(minder.COMMAND_VARIABLE, run_id), what="nothing is left"
    )
    assert time.monotonic() - begun < 120


@pytest.mark.slow
def test_g22_what_the_program_of_a_run_prints_is_kept_and_shown_by_logs(live: Lives, tmp_path: Path) -> None:
    lived = live((sys.executable, "-c", "print('a word')"), flags={"name": "dev"})
    assert lived.code == 0, lived.stderr
    assert (lived.folder / program_log.FILE).read_text() == "a word\n"
    shown = Typed(tmp_path / "project", tmp_path / "home")("logs", "dev", "--which", "program")
    assert (shown.returncode, shown.stdout) == (0, "a word\n"), shown.stderr


@pytest.mark.slow
def test_what_a_program_prints_is_not_kept_where_nobody_wants_it(live: Lives) -> None:
    lived = live((sys.executable, "-c", "print('a word')"), flags={"keep_output": "false"})
    assert lived.code == 0 and not (lived.folder / program_log.FILE).exists()
