"""`launch --gpus H100:4` on a rig's laptop, as a user types it: what it says, its record, what it leaves.

Neighbours: `rig.py` is the cloud and the laptop; the tests of whole rented runs start here. The build of the
runtime is the CPU's, everything else of the launcher is as shipped.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cloud.rig import REPOSITORY, Finished, Rig
from tests.support.waiting import wait_until

LAUNCH = str(Path(sys.executable).with_name("launch"))
RENTED = ("--gpus", "H100:4", "--infra", "aws", "-y")
EVERYWHERE = " ".join(f"{region}{zone}" for region in ("us-east-1", "us-west-2") for zone in "abcdef")
# SkyPilot's processes under their own names and the ones it gives itself, and what asks it.
SKYPILOT = ("sky_server", "SkyPilot:", "sky_calls")
OURS = (*SKYPILOT, "launcher.", "ssh -", LAUNCH)


class Launched:
    """`launch` on a rig's laptop; all it says is in `text`.

    `launch`: what is typed in its place; `name`: the run's, where the laptop has others.
    """

    def __init__(
        self,
        rig: Rig,
        words: Sequence[str],
        *,
        launch: Sequence[str] = (LAUNCH,),
        name: str | None = None,
        **environ: str,
    ) -> None:
        self._rig = rig
        self._name = name
        self._log = rig.folder / f"launch-{secrets.token_hex(4)}.txt"
        self.begun_at = time.time()
        with self._log.open("wb") as log:
            self.process = rig.start(
                [*launch, *words],
                cwd=REPOSITORY,
                environ=rig.environ(SLIPWAY_CLOUD_VARIANT="cpu", NO_COLOR="1", **environ),
                stdout=log,
                stderr=log,
            )

    @property
    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str, seconds: float) -> None:
        """Until it says so; AssertionError when it ends before."""
        wait_until(
            lambda: text in self.text or self.process.poll() is not None,
            seconds,
            lambda: f"{text}\n{self.text}",
        )
        assert text in self.text, self.text

    def wait(self, seconds: float) -> int:
        """Its exit code; negative when a signal ended it."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not over after {seconds:g} s\n{self.text}") from None

    def send(self, number: signal.Signals) -> None:
        self._rig.send(self.process, number)

    @property
    def run(self) -> Path:
        """The run's folder."""
        folders = (self._rig.folder / "launch" / "runs").glob("slip-*")
        (folder,) = (one for one in folders if self._name is None or _name_of(one) == self._name)
        return folder

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.run / "record.json").read_text())


def _name_of(run: Path) -> str | None:
    """None also for a run whose record is not written yet."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads((run / "record.json").read_text())["name"]
    return None


def verb(rig: Rig, *words: str) -> str:
    """What a verb of `launch` says on the laptop."""
    return rig.run([LAUNCH, *words], seconds=600, environ=rig.environ(NO_COLOR="1")).ok()


def running(rig: Rig, *names: str) -> dict[int, str]:
    """What runs on the rig with one of these in its command line, by the pid out here."""
    return {pid: line for pid, line in rig.processes().items() if any(name in line for name in names)}


def left(rig: Rig, *more: str) -> list[str]:
    """What still runs of SkyPilot, of ssh, of ours and of `more`."""
    return list(running(rig, *OURS, *more).values())


_WITHOUT_OTHERS = """
mount --bind "$1" /mnt && mount -t tmpfs none /tmp && mkdir -p "$1" && mount --move /mnt "$1"
shift && exec "$@"
"""


def collect(rig: Rig, *words: str, launch: Sequence[str] = (LAUNCH,), **environ: str) -> Finished:
    """`launch gc`, with a /tmp of its own: from within a rig nobody sees whose the sockets of this computer's
    other runs are."""
    alone = ["unshare", "--mount", "sh", "-ec", _WITHOUT_OTHERS, "-", str(REPOSITORY)]
    return rig.run(
        [*alone, *launch, "gc", *words], seconds=1800, environ=rig.environ(NO_COLOR="1", **environ)
    )
