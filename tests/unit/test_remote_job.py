"""A script on a machine and what it prints, through the real ssh (remote_job.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.backends.ssh.remote_folder import RemoteFolder
from launcher.backends.ssh.remote_job import RemoteJob
from launcher.base.errors import JobFailed
from tests.support.own_sshd import OwnSshd

pytestmark = pytest.mark.process

# Of the first, a look of 4 MiB, and the next one, end within an "é"; of the second, one ends with the output.
LONG = "\n".join(["x" + "é" * 4094] * 1153)
WHOLE_LOOK = ("y" * 8191 + "\n") * 512


@pytest.mark.parametrize("text", [LONG, WHOLE_LOOK], ids=["9 MiB", "4 MiB"])
def test_p16_a_long_output_is_read_in_parts_and_to_its_end(tmp_path: Path, text: str) -> None:
    sshd = OwnSshd(tmp_path / "sshd")
    printed = tmp_path / "printed"
    printed.write_text(text)
    job = RemoteJob(RemoteFolder(sshd.host(), str(sshd.home / "state"), tmp_path / "here"), "setup")
    job.start(f"cat '{printed}'; exit 3\n", 60.0)
    told: list[str] = []
    with pytest.raises(JobFailed, match="exit code 3"):
        job.wait(60.0, told.append, lambda: pytest.fail("as if the machine could not be reached"))
    assert told == text.splitlines()
    assert (tmp_path / "here" / "logs" / "setup.log").read_text() == text
