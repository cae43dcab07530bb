"""Lanes: every test runs once, what a lane says arrives whole, and a lane that breaks is no success."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import descendants, lane_reports
from tests.support.environment import PROGRAMS, REPOSITORY
from tests.support.lane import Lane, LaneError
from tests.support.lanes import GPU_LANE, LANES, lane_of
from tests.support.places import are_taken, places
from tests.support.waiting import wait_until

pytestmark = pytest.mark.process

_FILE = """
import os, pytest
def test_passes(): pass
def test_fails(): assert 1 == 2, "so it is"
def test_is_left_out(): pytest.skip("not here")
@pytest.mark.parametrize("case", ["a", "b"])
def test_has_cases(case): assert case == "a"
def test_breaks_the_lane(): os._exit(7)
def test_comes_after(): pass
"""


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[Lane]:
    """A lane of its own, in a folder whose conftest is not this suite's."""
    file = tmp_path / "test_some.py"
    file.write_text(_FILE)
    lane = Lane("some", sys.executable, [str(file)], os.environ, "--rootdir", str(tmp_path))
    yield lane
    lane.close()


def outcomes(lane: Lane, name: str) -> list[tuple[str, str]]:
    return [(report["when"], report["outcome"]) for report in lane.reports(f"test_some.py::{name}")]


def test_what_a_lane_says_of_each_test_arrives_and_one_that_breaks_is_said(lane: Lane) -> None:
    passed = [("setup", "passed"), ("call", "passed"), ("teardown", "passed")]
    assert outcomes(lane, "test_passes") == passed
    assert ("call", "failed") in outcomes(lane, "test_fails")
    assert "so it is" in str(lane.reports("test_some.py::test_fails"))
    assert ("call", "skipped") in outcomes(lane, "test_is_left_out")
    assert outcomes(lane, "test_has_cases[a]") == passed
    assert [one for one in outcomes(lane, "test_has_cases") if one[0] == "call"] == [
        ("call", "passed"),
        ("call", "failed"),
    ]
    with pytest.raises(LaneError, match=r"ended without running .*test_breaks_the_lane"):
        lane.reports("test_some.py::test_breaks_the_lane")
    with pytest.raises(LaneError, match="without running"):
        lane.reports("test_some.py::test_comes_after")
    assert "ended with 7" in (lane.close() or "")


def test_a_test_that_hangs_ends_its_lane_which_says_where(tmp_path: Path) -> None:
    file = tmp_path / "test_hanging.py"
    file.write_text("import threading\ndef test_hangs(): threading.Event().wait()\n")
    words = ("--rootdir", str(tmp_path), "-o", "faulthandler_timeout=0.1")
    lane = Lane("some", sys.executable, [str(file)], os.environ, *words)
    try:
        with pytest.raises(LaneError, match=r"(?s)ended without running .*Timeout.* in test_hangs"):
            lane.reports("test_hanging.py::test_hangs")
    finally:
        lane.close()


def test_each_folder_of_slow_tests_has_its_lanes_and_no_lane_is_without_tests() -> None:
    files = [str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "tests").glob("*/test_*.py")]
    taken = {name: [file for file in files if lane_of(f"{file}::test_x") == name] for name in (None, *LANES)}
    assert all(taken.values()), taken
    assert {Path(file).parts[1] for file in taken[None]} == {"unit"}


def test_what_runs_below_a_lane_is_no_other_tests_to_find() -> None:
    """A test that broke each sshd below it broke those of the rented machines in the lanes."""
    below = "import subprocess; subprocess.run(['sleep', '600'])"
    lane = subprocess.Popen([sys.executable, "-c", below, lane_reports.__name__])
    own = subprocess.Popen(["sleep", "600"])
    try:
        (lanes_own,) = wait_until(lambda: descendants.named("sleep", lane.pid), 60, "what the lane started")
        found = {process.pid for process in descendants.named("sleep")}
        assert own.pid in found and lanes_own.pid not in found
    finally:
        descendants.send(descendants.named("sleep", lane.pid), signal.SIGKILL)
        for process in (lane, own):
            process.kill()
            process.wait()


def test_a_lane_that_finds_no_place_has_the_one_of_the_next_that_ends(tmp_path: Path) -> None:
    def begin(name: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, PROGRAMS / "unit" / "lane_place.py", tmp_path / "places", "2"]
        environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        with (tmp_path / name).open("wb") as said:
            return subprocess.Popen(words, env=environ, stdin=subprocess.PIPE, stdout=said)

    def place(name: str) -> int:
        wait_until(lambda: (tmp_path / name).read_text().endswith("\n"), what=f"{name} has a place")
        return int((tmp_path / name).read_text())

    begun = {"one": begin("one"), "two": begin("two")}
    try:
        taken = {place(name): begun[name] for name in ("one", "two")}
        assert set(taken) == {0, 1}
        assert are_taken(tmp_path / "places", 2) and not are_taken(tmp_path / "places", 3)
        begun["three"] = begin("three")
        taken[1].kill()
        assert place("three") == 1
    finally:
        for process in begun.values():
            process.kill()
            process.communicate()


def test_a_suite_alone_has_a_place_for_each_of_its_lanes() -> None:
    assert places(len(LANES)) >= len(LANES)
    assert places(10**6) == 10**6


def on_gpu(marks: str) -> subprocess.CompletedProcess[str]:
    """The tests that need a GPU, with these marks, on a computer without one, in CI."""
    folders = os.environ["PATH"].split(os.pathsep)
    path = os.pathsep.join(folder for folder in folders if not (Path(folder) / "nvidia-smi").exists())
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *marks.split(maxsplit=1),
            "tests/gpu",
        ],
        cwd=REPOSITORY,
        env={**os.environ, "CI": "true", "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("marks", ["", "-m slow", "-m long or matrix", "-m not quick"])
def test_what_needs_a_gpu_is_left_out_until_it_is_asked_for_by_name(marks: str) -> None:
    done = on_gpu(marks)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout + done.stderr
    assert "deselected" in done.stdout and "skipped" not in done.stdout


def test_what_needs_a_gpu_is_refused_without_one_and_nothing_is_built_for_it() -> None:
    done = on_gpu("-m gpu")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "tests/gpu/ needs a GPU: there is no NVIDIA driver" in done.stderr
    assert lane_of("tests/gpu/test_engine.py::test_x") == GPU_LANE
