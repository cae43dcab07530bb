"""The hold on a run: what is missing is named, a retry is the same request, a step happens once."""

from __future__ import annotations

import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from launcher.cli.main import split
from launcher.client import EndpointLost, NotConnected, Refused, Session, StepFailed, connect, group
from launcher.client.wire import Endpoint, Patience, Wire
from runtime.shared.checkpoint import MAX_PINNED
from tests.support import readme_commands
from tests.support.environment import PROGRAMS
from tests.support.small_door import Door, Reply, Request
from tests.support.small_run import PATIENCE, TOKEN, SmallRun


@pytest.fixture
def run() -> Iterator[SmallRun]:
    small = SmallRun()
    yield small
    small.close()


def test_outside_a_run_it_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAUNCH_BASE_URL", raising=False)
    with pytest.raises(NotConnected, match=r"LAUNCH_BASE_URL is not set\nHint: launch -- python "):
        connect()


# The words that Python was started with, and the program in the hint.
STARTED = [
    ("my.py --steps 3", "python my.py --steps 3"),
    ("-u -X dev -W ignore -m my.train a", "python -u -X dev -W ignore -m my.train a"),
    ("-Bm my.train", "python -Bm my.train"),
    ("/venv/bin/my-train --seed 1", "python /venv/bin/my-train --seed 1"),
    ("my.py --hf-token hf_x --lr 1", "python my.py --hf-token '***' --lr 1"),
    ("-c pass", "python YOUR_PROGRAM.py"),
    ("-uc pass my.py", "python YOUR_PROGRAM.py"),
    ("-", "python YOUR_PROGRAM.py"),
    ("", "python YOUR_PROGRAM.py"),
    ("-m pytest -q", "python YOUR_PROGRAM.py"),
    ("/venv/bin/pytest -q", "python YOUR_PROGRAM.py"),
    ("-m debugpy --listen 5678 my.py", "python YOUR_PROGRAM.py"),
    ("-X frozen_modules=off /ide/debugpy/launcher/../../debugpy --connect 1 my.py", "python YOUR_PROGRAM.py"),
    ("/ide/pydevd.py --port 1 --file my.py", "python YOUR_PROGRAM.py"),
    ("-m ipykernel_launcher -f kernel.json", "python YOUR_PROGRAM.py"),
]


@pytest.mark.parametrize(("words", "program"), STARTED)
def test_outside_a_run_the_hint_has_the_program_if_it_is_one(
    words: str, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LAUNCH_BASE_URL", raising=False)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", *words.split()])
    with pytest.raises(NotConnected) as raised:
        connect()
    assert raised.value.hint == f"launch -- {program}"


def test_outside_a_run_a_notebook_is_told_of_an_endpoint_to_connect_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LAUNCH_BASE_URL", raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-m", "ipykernel_launcher", "-f", "kernel.json"])
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    with pytest.raises(NotConnected) as raised:
        connect()
    command, _, remark = (raised.value.hint or "").partition("  # ")
    assert (command, remark) == ("launch up --name dev", 'in a terminal, and then connect("dev")')
    own, program = split(shlex.split(command)[1:])
    readme_commands.parsed(own, program)  # raises if `launch` could not read it


def test_inside_a_run_the_environment_is_enough(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCH_BASE_URL", run.base_url)
    monkeypatch.setenv("LAUNCH_API_KEY", TOKEN)
    session = connect()
    assert (session.model, session.version, session.client_state) == ("policy", 0, None)
    assert session.base_url == run.base_url
    assert session.rollout_url("r1") == run.base_url.replace("/v1", "/rollouts/r1/v1")
    assert TOKEN not in repr(session)


def test_a_wrong_token_is_named_as_such(run: SmallRun) -> None:
    with pytest.raises(Refused, match="not this run's token"):
        connect(run.base_url, "another")


@pytest.mark.slow
@pytest.mark.parametrize("trouble", [[503, 503], ["cut before"], ["cut after"], [429, "cut after", 502]])
def test_a_step_happens_once_whatever_the_connection_does(run: SmallRun, trouble: list[int | str]) -> None:
    session = run.session()
    run.break_next += trouble
    run.refuse_empty = False
    status = session.step([group("g", {"r1": 1.0, "r2": 0.0})], client_state={"step": 1})
    assert (status.state, status.version) == ("published", 1)
    assert len(run.requests) == 1
    assert len({request for path, request in run.posted if path == "/slipway/steps"}) == 1
    assert run.client_state == {"step": 1}


def test_the_same_key_with_another_body_is_refused(run: SmallRun) -> None:
    session = run.session()
    run.refuse_empty = False
    session.step([group("g", {"r1": 1.0})], key="k")
    assert session.step([group("g", {"r1": 1.0})], key="k").version == 1
    with pytest.raises(Refused, match="a different body") as caught:
        session.step([group("g", {"r1": 0.0})], key="k")
    assert (caught.value.status, caught.value.code) == (409, "key_reused")


def test_a_failed_step_raises_with_the_runtimes_reason(run: SmallRun) -> None:
    session = run.session()
    run.refuse_empty, run.fail_step = False, "the trainer ran out of memory"
    with pytest.raises(StepFailed, match="out of memory"):
        session.step([group("g", {"r1": 1.0})])


def test_a_reward_that_is_a_text_excludes_the_rollout_with_that_reason(run: SmallRun) -> None:
    session = run.session()
    run.refuse_empty = False
    session.step([group("g", {"r1": 1.0, "r2": "the judge was away", "r3": None})])
    members = run.requests[1].groups[0].members
    assert [(it.reward, it.failure) for it in members] == [
        (1.0, None),
        (None, "the judge was away"),
        (None, "no reward"),
    ]


def test_a_client_state_that_is_too_large_is_refused_before_it_is_sent(run: SmallRun) -> None:
    session = run.session()
    with pytest.raises(ValueError, match="at most 65536"):
        session.step([group("g", {"r1": 1.0})], client_state={"x": "y" * 70_000})
    assert not run.requests


def test_checkpoints_are_listed_pinned_and_restored(run: SmallRun) -> None:
    session = run.session()
    run.refuse_empty = False
    session.step([group("g", {"r1": 1.0})])
    (kept,) = session.checkpoints()
    session.pin(kept.name)
    assert session.restore(kept.name).version == 2
    assert (run.pinned, run.restored) == (["step-000001"], ["step-000001"])
    assert [it["step"] for it in session.metrics()] == [1, 2]


def test_c55_what_is_pinned_no_longer_is_said_by_name(
    run: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    assert f"until {MAX_PINNED} others have been pinned" in str(Session.pin.__doc__)
    session = run.session()
    run.refuse_empty = False
    session.step([group("g", {"r1": 1.0})])
    session.pin("step-000001")
    assert not capfd.readouterr().err
    run.lets_go = ["step-000003", "step-000012"]
    assert session.pin("step-000001").let_go == run.lets_go
    assert "others were pinned since: policy@v3, policy@v12" in capfd.readouterr().err


def test_a_kept_connection_is_not_closed_for_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """httpcore closes an old one that another thread has just been given, which then waits for ever."""
    served: list[threading.Thread] = []  # one for each connection

    def answer(request: Request) -> Reply:
        served.append(threading.current_thread())
        return 200, {}, {}

    door, now = Door(answer), time.monotonic
    wire = Wire(Endpoint(f"http://127.0.0.1:{door.port}", TOKEN), PATIENCE)
    wire.send("GET", "/slipway/status")
    with monkeypatch.context() as later:
        later.setattr("time.monotonic", lambda: now() + 600.0)
        wire.send("GET", "/slipway/status")
    door.close()
    assert len(served) == 2 and served[0] is served[1]


@pytest.mark.process
def test_an_endpoint_that_stays_away_is_given_up_with_what_was_last_seen(run: SmallRun) -> None:
    session = connect(run.base_url, TOKEN, Patience(answer_seconds=2.0, away_seconds=0.5))
    run.break_next += [503] * 20
    with pytest.raises(EndpointLost, match=r"HTTP 503(.|\n)*not now"):
        session.status()


@pytest.mark.slow
def test_importing_the_client_imports_no_dspy() -> None:
    program = PROGRAMS / "unit" / "import_client.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
