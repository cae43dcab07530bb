"""descriptor_polling.py in a process that has more than 1,024 files open, which `select` refuses."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from launcher.backends.ssh import rsync
from launcher.backends.ssh.link import SshHost
from launcher.backends.ssh.remote_log import RemoteLog
from launcher.backends.ssh.rsync import Transfer
from launcher.base import descriptor_polling
from launcher.base.errors import JobFailed
from launcher.client import holder
from launcher.teardown import guardian, minder
from launcher.teardown.program_log import ProgramLog
from launcher.teardown.program_streams import ProgramStreams
from tests.support.waiting import wait_until

MANY = 1100


@pytest.fixture
def many_open() -> Iterator[None]:
    """More files than `select` knows, as with a thousand rollouts; what is opened now comes after."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2 * MANY:
        if hard != resource.RLIM_INFINITY and hard < 2 * MANY:
            pytest.skip(f"this system allows {hard} open files")
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * MANY, hard))
    with ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(MANY):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield


@pytest.fixture(params=["few", "many"])
def open_files(request: pytest.FixtureRequest) -> None:
    """Each of the two ways to ask."""
    if request.param == "many":
        request.getfixturevalue("many_open")


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Both ends; a test may have closed one."""
    ends = os.pipe()
    yield ends
    for end in ends:
        with suppress(OSError):
            os.close(end)


@pytest.mark.usefixtures("open_files")
def test_what_can_be_read_is_known_of_every_number(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    assert (
        descriptor_polling.wait_readable([reading], 0)
        == descriptor_polling.wait_readable([reading], 0.01)
        == []
    )
    os.write(writing, b".")
    assert descriptor_polling.wait_readable([reading]) == [reading]
    os.read(reading, 1)
    os.close(writing)
    assert descriptor_polling.wait_readable([reading]) == [reading], "its end is to be read"
    os.close(reading)
    with pytest.raises(OSError, match="Bad file descriptor"):
        descriptor_polling.wait_readable([reading], 0)


@pytest.mark.usefixtures("open_files")
def test_what_can_be_written_is_waited_for(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while os.write(writing, bytes(4096)):
            pass
    waiting = threading.Thread(target=descriptor_polling.wait_writable, args=(writing,))
    waiting.start()
    assert waiting.is_alive()
    while descriptor_polling.wait_readable([reading], 0):
        os.read(reading, 1 << 20)
    waiting.join(60)
    assert not waiting.is_alive() and os.write(writing, b".") == 1


@pytest.mark.process
@pytest.mark.usefixtures("many_open")
def test_g17_a_guardian_and_a_program_begin_while_a_thousand_rollouts_are_in_flight(tmp_path: Path) -> None:
    watching = guardian.start(tmp_path / "record.json")
    watching.release()
    kept = tmp_path / "program.log"
    assert minder.start([sys.executable, "-c", "print(1 + 1)"], os.environ, keep=kept).wait(120) == 0
    assert kept.read_text() == "2\n"


@pytest.mark.process
@pytest.mark.usefixtures("many_open")
def test_g17_copies_and_logs_come_while_a_thousand_rollouts_are_in_flight(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "there" / "weights").write_bytes(bytes(1000))
    assert (
        rsync.run(["-a", f"{tmp_path}/there/", f"{tmp_path}/home/"], tmp_path, Transfer(1000)).bytes == 1000
    )
    gone = SshHost("machine", "nobody", tmp_path / "key", tmp_path / "known_hosts", proxy_command="false")
    with pytest.raises(JobFailed):
        RemoteLog(gone, "trainer.log", False, lambda: "up", "launch logs dev").show(lost_seconds=0)


@pytest.mark.usefixtures("many_open")
def test_what_a_program_prints_is_handed_on_by_high_numbers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    streams = ProgramStreams(ProgramLog(tmp_path / "kept"))
    assert streams.for_command[0] is not None
    left_behind = os.dup(streams.for_command[0])
    streams.begin()
    os.write(left_behind, b"a last word\n")
    wait_until(lambda: streams.done() and (tmp_path / "kept").exists(), what="nothing is on its way any more")
    assert capfd.readouterr().out == "a last word\n"
    os.close(left_behind)
    wait_until(lambda: descriptor_polling.wait_readable([streams.ended], 0) != [], what="its end")


@pytest.mark.process
@pytest.mark.usefixtures("many_open")
def test_a_holder_that_a_process_with_many_open_files_starts_ends_its_run_in_order(
    pipe: tuple[int, int],
) -> None:
    reading, writing = pipe
    command = [sys.executable, "-P", "-m", "launcher.client.holder"]
    held = subprocess.Popen([*command, "--pipe", str(reading), "--", *command], pass_fds=(reading,))
    os.write(writing, holder.DONE)
    assert held.wait(120) == 0
