"""The whole suite in lanes: pytests beside each other, so that what waits keeps nothing else waiting.

A test of a lane is shown here, where it stands among the others, and runs in its lane, a pytest of its own
(`lane.py`). What no lane takes runs here. The tests of `tests/runtime` and `tests/gpu` (`remote_items.py`)
always run in a lane, in the runtime's environment; the others only when the slow tests of several lanes were
asked for. Suites side by side share the places of the computer (`places.py`).
`--one-by-one` runs all but those here, one after the other: for a debugger, for measuring one alone.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest

from tests.support.environment import REPOSITORY, runtime_environ, runtime_python
from tests.support.lane import Lane, LaneError, in_a_lane
from tests.support.places import are_taken, of_this_computer
from tests.support.turns import Turns, is_left_out

RUNTIME = "tests/runtime/"
GPU = "tests/gpu/"
# Which tests run in which lane, by the beginnings of their ids; the first that fits. Lanes that start with
# `runtime` have the runtime's environment. Each computes about as long as the others, alone on a computer:
# `python -m tests.bench.minutes`.
_SLOWEST_UNITS = (
    "checkpoint_upload", "client_killed", "client_place", "client_pool_replay", "denied_regions", "elsewhere",
    "ending_", "hints", "made_credentials", "other_account", "parsed_fields", "played_", "price", "program_",
    "relay_door", "results_download", "run.py", "sky_server",
)  # fmt: skip
_RENTED = ("forgotten", "launch", "leaving", "losses", "rig", "timers")
# These take no part in the endpoints that the other runs share.
_OWN_RUNS = (
    "agents", "ahead_killed", "arbor", "bench", "dspys_grpo_texts", "exact_samples", "killed", "leaving",
    "quickstart", "resume", "secrets",
)  # fmt: skip
# These take no part in the engine that the runtime's other tests share.
_OWN_PROCESSES = (
    "admission_life", "checkpoint", "crash_", "engine_families", "families", "processes",
    "recipe", "runtime.py", "steps_restart", "supervision",
)  # fmt: skip
LANES: dict[str, tuple[str, ...]] = {
    "units": tuple(f"tests/unit/test_{name}" for name in _SLOWEST_UNITS),
    "rented": tuple(f"tests/cloud/test_{name}.py" for name in _RENTED),
    "machines": ("tests/cloud/",),
    "mutants": ("tests/mutations/",),
    "own-runs": tuple(f"tests/e2e/test_{name}.py" for name in _OWN_RUNS),
    "runs": ("tests/e2e/",),
    "runtime-processes": tuple(f"{RUNTIME}test_{name}" for name in _OWN_PROCESSES),
    "runtime": (RUNTIME,),
}
# Beside the others, where a GPU is asked for by name: it takes no place of theirs.
GPU_LANE = "runtime-gpu"
# For a test in the runtime's environment that needs the launcher's.
LAUNCHER_PYTHON = "SLIPWAY_TEST_LAUNCHER_PYTHON"
_IN_ITS_PLACE = ("-p", "tests.support.places")
_ALONE = "--one-by-one"
_EVERY_TURN = "--every-turn"
_IN_LANES = pytest.StashKey[bool]()
_STARTED = pytest.StashKey[dict[str, Lane]]()
# Of a whole run that leaves out whose turn it is not: how many tests.
_LEFT_OUT = pytest.StashKey[int]()


def lane_of(nodeid: str) -> str | None:
    """The lane that takes a test; None for those that run here."""
    taken = (name for name, starts in {**LANES, GPU_LANE: (GPU,)}.items() if nodeid.startswith(starts))
    return next(taken, None)


def pytest_configure() -> None:
    """What is read here is compiled once for all lanes, also where PYTHONDONTWRITEBYTECODE is set."""
    sys.dont_write_bytecode = False


def pytest_addoption(parser: pytest.Parser) -> None:
    """What a session may choose."""
    parser.addoption(
        _ALONE, action="store_true", help="run all tests of this environment here, one after the other"
    )
    parser.addoption(
        _EVERY_TURN, action="store_true", help="a whole run with all tests that take turns (turns.py)"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Decide whether there are lanes, and have what runs here come first: the lanes work meanwhile.

    Lanes are for the slow tests of more than one of them, when nobody debugs. A whole run leaves out whose
    turn it is not.
    """
    option = config.option
    if (
        config.args_source is config.ArgsSource.TESTPATHS
        and "not long" in option.markexpr
        and not option.every_turn
    ):
        _leave_out(config, items)
    chosen = {lane_of(item.nodeid) for item in items if item.get_closest_marker("slow")}
    alone = option.one_by_one or option.usepdb or option.capture == "no" or in_a_lane()
    config.stash[_IN_LANES] = not alone and len(chosen) > 1
    items[:] = sorted(items, key=lambda item: _lane_for(item) is not None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Start the lanes. Those of this environment first: the runtime's may have to be built."""
    session.config.stash[_STARTED] = {}
    if session.config.option.collectonly:
        return
    chosen: defaultdict[str, list[str]] = defaultdict(list)
    for item in session.items:
        if (name := _lane_for(item)) is not None:
            chosen[name].append(item.nodeid)
    if chosen and are_taken(*of_this_computer()):
        print(
            "\nAnother suite runs on this computer: these tests wait until it has a place for them.",
            file=sys.stderr,
        )
    for name in sorted(chosen, key=_is_the_runtimes):
        session.config.stash[_STARTED][name] = _start(name, chosen[name])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Show what a lane of this environment said of a test, in place of running it."""
    name = _lane_for(item)
    if name is None or _is_the_runtimes(name):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports_or_failure(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # As pytest's runner does after each test: what a test of this process left up for its next one ends here.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def pytest_report_collectionfinish(config: pytest.Config) -> str | None:
    """How much less than everything a whole run is."""
    if count := config.stash.get(_LEFT_OUT, 0):
        return f"{count} tests have their turn in the next two runs (--every-turn runs all)"
    return None


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    turn = Turns().now()
    left_out = [item for item in items if is_left_out(item.nodeid, turn)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
    config.stash[_LEFT_OUT] = len(left_out)


def reports(item: pytest.Item) -> list[pytest.TestReport]:
    """What the lane of a test said of it, all its cases; waits until they are over. Raises LaneError."""
    name = _lane_for(item)
    assert name is not None
    lane = item.config.stash[_STARTED][name]
    return [
        item.config.hook.pytest_report_from_serializable(config=item.config, data=said)
        for said in lane.reports(item.nodeid)
    ]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End what still runs; a lane that did not end well is no success."""
    for trouble in filter(None, _close(session.config)):
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
        print(f"\n{trouble}", file=sys.stderr)
    has_run = session.testscollected and not session.config.option.collectonly
    if _LEFT_OUT in session.config.stash and has_run and session.exitstatus == pytest.ExitCode.OK:
        Turns().pass_on()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave no child behind."""
    list(_close(config))


def _close(config: pytest.Config) -> Iterator[str | None]:
    started = config.stash.get(_STARTED, {})
    for lane in started.values():
        lane.stop()
    while started:
        yield started.popitem()[1].close()


def _reports_or_failure(item: pytest.Item) -> Iterable[pytest.TestReport]:
    try:
        return reports(item)
    except LaneError as error:
        return [pytest.TestReport(item.nodeid, item.location, {}, "failed", str(error), "call")]


def _start(name: str, nodeids: list[str]) -> Lane:
    if name == GPU_LANE:
        _refuse_without_gpu()
        environ = runtime_environ() | {LAUNCHER_PYTHON: sys.executable}
        return Lane(name, runtime_python("cuda"), nodeids, environ, "--confcutdir", str(REPOSITORY / GPU))
    if _is_the_runtimes(name):
        confined = ("--confcutdir", str(REPOSITORY / RUNTIME))
        return Lane(name, runtime_python(), nodeids, runtime_environ(), *_IN_ITS_PLACE, *confined)
    return Lane(name, sys.executable, nodeids, os.environ, *_IN_ITS_PLACE)


def _refuse_without_gpu() -> None:
    """Before the CUDA build, which is large, is fetched for nothing."""
    from launcher.backends import local_gpus
    from launcher.base.errors import PreflightError
    from runtime.fitness import Needs

    try:
        local_gpus.choose(Needs("cuda", "local:1"), os.environ)
    except PreflightError as error:
        raise pytest.UsageError(f"{GPU} needs a GPU: {error.why}") from None


def _is_the_runtimes(name: str) -> bool:
    return name.startswith("runtime")


def _lane_for(item: pytest.Item) -> str | None:
    """The lane that runs a test in this session."""
    name = lane_of(item.nodeid)
    if name is None or _is_the_runtimes(name):
        return name
    return name if item.config.stash[_IN_LANES] else None
