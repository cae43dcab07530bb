"""rsync.py, copy_rate.py with the real rsync: seen while it moves, ended when it does not."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from launcher.backends.ssh import rsync
from launcher.backends.ssh.copy_rate import FIRST_BYTES_PER_SECOND, CopyRate
from launcher.backends.ssh.rsync import RsyncError, Transfer, TransferProgress
from tests.support import descendants

SIZE = 6_000_000
# Slow enough to be met on its way, by whoever looks once a second.
SLOW = 500_000.0
# More than rsync and the socket between its two processes hold: when so much was sent, some of it has come.
SOME_HAS_COME = 1_000_000


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A folder with a file that takes some seconds at the slow rate."""
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "weights").write_bytes(os.urandom(SIZE))
    return folder


def _copy(weights: Path, copy: Transfer) -> TransferProgress:
    home = weights.with_name("home")
    home.mkdir(exist_ok=True)
    return rsync.run(["-a", f"{weights}/", f"{home}/"], weights, copy)


def _on_its_way(act: Callable[[], object]) -> Callable[[TransferProgress], None]:
    done = []

    def seen(moved: TransferProgress) -> None:
        if moved.bytes >= SOME_HAS_COME and not done:
            done.append(moved)
            act()

    return seen


@pytest.fixture
def stop_all() -> Iterator[Callable[[], None]]:
    """Has every rsync of this process stand still; what stands still at the end of the test is killed."""
    stopped: list[psutil.Process] = []

    def stop() -> None:
        stopped.extend(descendants.named("rsync"))
        descendants.send(stopped, signal.SIGSTOP)

    yield stop
    descendants.send(stopped, signal.SIGKILL)


@pytest.mark.process
def test_g22_a_copy_says_how_far_it_is_how_fast_and_what_is_left(weights: Path) -> None:
    seen: list[TransferProgress] = []
    moved = _copy(weights, Transfer(SIZE, seen.append, rate=SLOW))
    assert moved.bytes == SIZE
    assert len({one.bytes for one in seen}) >= 3, seen
    on_its_way = next(one for one in seen if 0 < one.bytes < SIZE and one.bytes_per_second)
    assert on_its_way.describe().startswith(f"{on_its_way.bytes / 1e6:.0f} MB of 6 MB, ")
    assert on_its_way.describe().endswith(" left")


@pytest.mark.process
def test_g22_a_copy_that_stands_still_is_ended_and_gone_on_from(
    weights: Path, stop_all: Callable[[], None]
) -> None:
    with pytest.raises(RsyncError, match="it stalled for 5 s") as still:
        _copy(weights, Transfer(SIZE, _on_its_way(stop_all), rate=SLOW, still_seconds=5.0))
    assert still.value.lost
    assert not descendants.named("rsync")
    assert _copy(weights, Transfer(SIZE)).bytes <= SIZE
    assert (weights.with_name("home") / "weights").read_bytes() == (weights / "weights").read_bytes()


@pytest.mark.process
def test_g22_a_copy_that_is_slower_than_is_accepted_is_ended_in_words(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rsync, "_MIN_SECONDS", 0.0)
    with pytest.raises(RsyncError, match=r"it was slower than 1000000\.0 MB/s: "):
        _copy(weights, Transfer(SIZE, slowest=1e12))


def test_g22_how_long_a_copy_may_take_is_by_its_size() -> None:
    seconds = Transfer(450_000_000).bound_seconds
    assert seconds > 450_000_000 / rsync.MIN_BYTES_PER_SECOND > 900, "it was 900 s whatever the size"
    assert Transfer(450_000_000, rate=150_000.0).bound_seconds > seconds, "held to a rate it may take longer"


@pytest.mark.process
def test_g22_a_copy_that_nobody_wants_any_more_is_broken_off_and_what_came_is_kept(weights: Path) -> None:
    over: list[bool] = []
    with pytest.raises(RsyncError, match="it was interrupted"):
        _copy(weights, Transfer(SIZE, _on_its_way(lambda: over.append(True)), lambda: bool(over), SLOW))
    assert 0 < (weights.with_name("home") / "weights").stat().st_size < SIZE


@pytest.mark.process
def test_g22_a_ctrl_c_at_the_terminal_reaches_no_copy(weights: Path) -> None:
    """The terminal sends it to all of our group: the first has results come home, and must not cut them."""
    groups: set[int] = set()

    def look() -> None:
        for one in descendants.named("rsync"):
            with contextlib.suppress(ProcessLookupError):
                groups.add(os.getpgid(one.pid))

    with pytest.raises(RsyncError, match="it was interrupted"):  # it was looked at, and need not come whole
        _copy(weights, Transfer(SIZE, _on_its_way(look), lambda: bool(groups), SLOW))
    assert os.getpgrp() not in groups


# ----------------------------------------------------------------- pace


class Line:
    """A line that carries so much; copies over it at a rate, a minute after one another."""

    def __init__(self, carries: float, copy_rate: CopyRate | None = None) -> None:
        self.carries = carries
        self.now = 0.0
        self.copy_rate = copy_rate or CopyRate(clock=lambda: self.now)

    def copy(self) -> float:
        """One copy of ten seconds; how fast it was."""
        speed = min(self.carries, self.copy_rate.rate or self.carries)
        self.now += 60.0
        self.copy_rate.learn(round(speed * 10), 10.0)
        return speed


@pytest.mark.parametrize("carries", [0.3e6, 2.5e6, 40e6])
def test_g23_copies_leave_half_of_the_line_to_the_rollouts(carries: float) -> None:
    line = Line(carries)
    assert line.copy() <= FIRST_BYTES_PER_SECOND
    for _ in range(10):
        line.copy()
    speeds = [line.copy() / carries for _ in range(30)]
    assert sorted(speeds)[len(speeds) // 2] == pytest.approx(0.5, abs=0.02)
    assert sum(speed > 0.9 for speed in speeds) <= 8, "the whole line is tried now and then"


def test_g23_a_line_that_became_better_is_noticed() -> None:
    line = Line(1e6)
    for _ in range(8):
        line.copy()
    line.carries = 20e6
    for _ in range(60):
        line.copy()
    assert line.copy() > 5e6


def test_g23_a_rate_that_was_asked_for_is_kept_whatever_the_line_does() -> None:
    line = Line(9e6, CopyRate(2e6))
    assert [line.copy() for _ in range(3)] == [2e6] * 3
    assert CopyRate(float("inf")).rate is None


def test_g23_what_comes_at_once_says_nothing_of_a_line() -> None:
    rate = CopyRate()
    rate.learn(1000, 0.5)
    assert rate.rate == FIRST_BYTES_PER_SECOND
