"""launcher/run/run.py: the order of a run's life, and that every way it can end ends in down and proof.

The machine is in this process; record, guardian, relay, heartbeat, minder and signals are the real ones.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.base.errors import CapacityError, JobFailed, LaunchError, NotPulled, NotStarted, PreflightError
from launcher.base.home import Home
from launcher.console.output import Output, phase_name
from launcher.records.records import RecordStore, RunRecord
from launcher.run.summary import Summary
from launcher.types.durability import DurabilityStatus
from launcher.types.machine import Machine, Proof
from tests.support.environment import PROGRAMS, REPOSITORY
from tests.support.pretend_machine import PretendMachine
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

IN_ORDER = ["arm", "push", "setup", "serve", "pull", "down", "proof"]


def test_the_pretend_machine_is_a_machine(tmp_path: Path) -> None:
    machine: Machine = PretendMachine(tmp_path)
    machine.down()


def test_a_run_goes_through_its_phases_in_order_and_ends_verified(live) -> None:
    lived = live()
    assert lived.code == 0
    assert lived.machine.calls == IN_ORDER
    assert lived.record.state == "verified"
    assert lived.record.ended_by == "launch"
    assert not lived.record.is_attended or lived.record.guardian is None or not lived.record.guardian.alive()
    begun = [item["phase"] for item in lived.objects if item["event"] == "phase" and item["state"] == "begin"]
    assert begun == ["arm", "push", "setup", "serve", "connect", "pull", "down"]
    assert {item["schema"] for item in lived.objects} == {1}
    assert lived.end["event"] == "end"
    assert (lived.end["step"], lived.end["version"]) == (3, 3)


def test_g21_the_program_is_told_which_life_of_its_run_it_is(live, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    text = f"import os; open({str(seen)!r}, 'w').write(os.environ['LAUNCH_PROGRAM'])"
    lived = live((sys.executable, "-c", text))
    assert seen.read_text().startswith(f"{lived.record.id}@0.")


def test_s04_the_program_is_told_the_line_that_started_it(live, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    text = f"import os; open({str(seen)!r}, 'w').write(os.environ['LAUNCH_LINE'])"
    live((sys.executable, "-c", text))
    assert shlex.split(seen.read_text()) == ["launch", "--", sys.executable, "-c", text]


EVENT_KEYS = {
    "run": {"run_id", "name", "plan", "folder", "log"},
    "phase": {"phase", "state"},
    "ready": {"base_url", "model", "run_dir"},
    "status": {
        "name", "up_seconds", "cost", "budget", "step", "reward", "tunnel_ms", "lease_left_seconds",
        "trouble",
    },
    "end": {
        "run_id", "name", "reason", "why", "exit_code", "program_exit_code", "seconds", "cost", "step",
        "version", "results", "down",
    },
}  # fmt: skip


def test_the_objects_of_a_run_have_the_promised_keys(live) -> None:
    lived = live((sys.executable, "-c", "import time; time.sleep(0.5)"))
    assert {item["event"] for item in lived.objects} == set(EVENT_KEYS)
    for item in lived.objects:
        assert {"schema", "event"} | EVENT_KEYS[item["event"]] <= set(item), item
    assert lived.objects[0]["plan"] == {
        "where": "this computer",
        "model": "tiny",
        "price_per_hour": 0.0,
        "deadline_seconds": None,
        "lease_seconds": 900.0,
        "budget": None,
        "rented": None,
        "candidates": [],
        "prices_of": None,
        "own": None,
        "adapter": None,
        "cost_at_most": 0.0,
        "dearest_per_hour": 0.0,
        "spent": 0.0,
    }


def test_record_and_guardian_stand_before_the_machine_is_armed(live, tmp_path: Path) -> None:
    seen: list[RunRecord] = []

    def look() -> None:
        home = Home(tmp_path / "home", tmp_path / "config", tmp_path / "cache")
        seen.extend(RecordStore(home).list())

    live(acts={"arm": look})
    assert seen[0].state == "arm"
    assert seen[0].guardian is not None
    assert seen[0].launch is not None
    assert seen[0].launch.pid == os.getpid()


def _program(name: str, *words: str | Path) -> tuple[str, ...]:
    return (sys.executable, str(PROGRAMS / "unit" / name), *map(str, words))


def _send(number: signal.Signals) -> None:
    """To the launcher, which is this process."""
    os.kill(os.getpid(), number)


def _once(condition: Callable[[], object], act: Callable[[], None]) -> threading.Thread:
    """Act as soon as a condition holds, in a thread of its own."""

    def wait() -> None:
        wait_until(condition)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def raise_(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize(
    ("phase", "error", "code"),
    [
        ("arm", CapacityError("no room"), 4),
        ("push", PreflightError("no disk"), 3),
        ("setup", JobFailed("no packages"), 6),
        ("serve", NotStarted("the engine did not start", "line one\nline two", last_lines=["line two"]), 3),
        ("setup", ZeroDivisionError("a bug"), 1),
    ],
)
def test_whatever_fails_on_the_way_up_everything_comes_down(
    live, phase: str, error: Exception, code: int
) -> None:
    lived = live(acts={phase: raise_(error)})
    assert lived.code == code
    assert lived.machine.calls[-2:] == ["down", "proof"]
    assert ("pull" in lived.machine.calls) == (phase == "serve"), "logs are there once something served"
    assert lived.record.state == "verified"
    assert "Error: " in lived.stderr
    assert lived.end["exit_code"] == code
    if isinstance(error, NotStarted):
        assert (
            "| line two" in lived.stderr
            and (lived.end["why"], lived.record.why) == ("line one line two",) * 2
        )
        assert lived.end["program_exit_code"] is None


def test_a_bug_leaves_its_traceback_in_the_log_and_not_on_the_screen(live) -> None:
    lived = live(acts={"setup": raise_(ZeroDivisionError("a bug"))})
    assert "Traceback" not in lived.stderr
    assert "ZeroDivisionError: a bug" in (lived.folder / "launch.log").read_text()
    assert str(lived.folder / "launch.log") in lived.stderr


def test_the_program_finds_the_endpoint_in_its_environment(live) -> None:
    lived = live(_program("ask_own_status.py"))
    assert lived.code == 0, lived.stderr
    assert (lived.folder / "results" / "seen").read_text() == "yes"
    assert lived.end["program_exit_code"] == 0


def test_openai_variables_are_set_only_when_asked_for(live) -> None:
    program = "import os, sys; sys.exit(0 if os.environ['OPENAI_BASE_URL'].startswith('http://127.') else 9)"
    assert live((sys.executable, "-c", program), flags={"openai_env": True}).code == 0


def test_a_program_that_fails_is_6_with_its_own_code_and_the_results_still_come_home(live) -> None:
    lived = live((sys.executable, "-c", "raise SystemExit(41)"))
    assert lived.code == 6
    assert lived.machine.calls == IN_ORDER
    assert "exit code 41" in lived.stderr
    assert "(SIG" not in lived.stderr
    assert lived.end["program_exit_code"] == 41
    assert lived.record.exit_code == 41


def test_g19_a_metric_that_always_raises_ends_the_run_with_6_and_its_message(
    live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The program is a real one, its optimizer too; its endpoint is the small one of the client's tests."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    lived = live(_program("train_with_broken_metric.py", tmp_path / "asked"))
    assert (lived.code, lived.end["program_exit_code"]) == (6, 1)
    words = r"The metric gave no score (\d+) times in a row\nit raised KeyError: 'no such column'"
    said = re.search(words, capfd.readouterr().err)
    assert said is not None and 16 <= int(said[1]) <= 16 + 16, "those beside it fail as well"
    assert int((tmp_path / "asked").read_text()) <= 16 + 16


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
@pytest.mark.parametrize("phase", ["arm", "setup", "serve"])
def test_a_signal_on_the_way_up_takes_everything_down(
    live, phase: str, number: signal.Signals, code: int
) -> None:
    lived = live(acts={phase: lambda: _send(number)})
    assert lived.code == code
    assert lived.machine.calls[-2:] == ["down", "proof"]
    assert lived.record.state == "verified"
    assert number.name in (lived.record.reason or "")


def test_a_signal_during_the_work_ends_the_program_and_brings_the_results_home(live, tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    interrupting = _once(lambda: marker.exists() and marker.read_text(), lambda: _send(signal.SIGTERM))
    lived = live(_program("wait_for_signal.py", marker))
    interrupting.join()
    assert lived.code == 143
    assert lived.machine.calls == IN_ORDER
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


def test_an_interrupt_lets_the_program_save_what_it_has(live, tmp_path: Path) -> None:
    started, saved = tmp_path / "started", tmp_path / "saved"
    interrupting = _once(started.exists, lambda: _send(signal.SIGINT))
    lived = live(_program("wait_for_signal.py", started, "INT", "0", saved))
    interrupting.join()
    assert lived.code == 130
    assert saved.exists()


def test_a_first_signal_during_the_pull_does_not_break_it_off(live) -> None:
    lived = live(acts={"pull": lambda: _send(signal.SIGINT)})
    assert lived.code == 130
    assert lived.machine.calls == IN_ORDER
    assert lived.end["results"]


def test_without_a_command_the_endpoint_is_held_until_a_signal(live) -> None:
    def interrupt(machine: PretendMachine) -> None:
        _once(lambda: machine.renewals >= 2, lambda: _send(signal.SIGINT))

    lived = live((), lease_seconds=12.0, prepare=interrupt)
    assert lived.code == 130
    assert lived.machine.renewals >= 2, "the lease is renewed each quarter of it"
    ready = next(item for item in lived.objects if item["event"] == "ready")
    assert ready["base_url"].startswith("http://127.0.0.1:")


def test_no_proof_is_exit_5_and_the_record_stays_open(live) -> None:
    def unproven(machine: PretendMachine) -> None:
        machine.proven = Proof(False, "a process is left")

    lived = live(prepare=unproven)
    assert lived.code == 5
    assert lived.end["down"] == {"verified": False, "detail": "a process is left"}
    assert "a process is left" in lived.stderr


def test_results_that_stay_behind_are_exit_8(live) -> None:
    lived = live(acts={"pull": raise_(NotPulled("the disk is full"))})
    assert lived.code == 8
    assert lived.machine.calls == IN_ORDER


def test_what_falls_behind_the_bound_of_durability_is_said_once_and_when_it_is_over(
    live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    caught_up = tmp_path / "caught-up"

    def fall_behind(machine: PretendMachine) -> None:
        def make_durable() -> None:
            machine.standing = DurabilityStatus(5, 5 if caught_up.exists() else 2)

        machine.acts["make_durable"] = make_durable

    lived = live(_program("catch_up.py", caught_up), prepare=fall_behind)
    warned = [item["text"] for item in lived.objects if item["event"] == "warning"]
    assert warned == [
        "copying checkpoints falls behind: committed step 5, durable step 2 (at most 1 behind, 3 behind)"
    ]
    (again,) = [item for item in lived.objects if item["event"] == "durable"]
    assert (again["committed_step"], again["durable_step"], again["durable_bound_steps"]) == (5, 5, 1)
    assert lived.end["committed_step"] == 5


def test_a_run_that_broke_off_says_how_it_is_taken_up(live) -> None:
    def committed(machine: PretendMachine) -> None:
        machine.standing = DurabilityStatus(3, 3)

    lived = live((sys.executable, "-c", "raise SystemExit(2)"), flags={"name": "dev"}, prepare=committed)
    assert lived.code == 6
    lines = io.StringIO()
    shown = Output(plain=True, stdout=io.StringIO(), stderr=lines, environ={})
    summary = Summary(
        "slip-0", "dev", 1.0, 0.0, None, None, Proof(True, "nothing"), "failed", 6, 2, DurabilityStatus(3, 3)
    )
    summary.say(shown)
    assert "  resume   launch --resume dev" in lines.getvalue()


def test_the_deadline_ends_a_run_with_7(live) -> None:
    lived = live((sys.executable, "-c", "import time; time.sleep(600)"), flags={"max": "15s"})
    assert lived.code == 7
    assert lived.machine.calls[-3:] == ["pull", "down", "proof"]
    assert lived.machine.config is not None
    assert 0 < (lived.machine.config.deadline_seconds or 0) < 15


def test_g23_the_runtime_is_told_how_long_its_model_may_take_to_come(
    live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.run.run.start_seconds", lambda model, size: 7200.0)
    config = live().machine.config
    assert config is not None and config.start_seconds == 7200.0


@pytest.mark.parametrize("phase", ["arm", "setup"])
def test_g06_a_limit_is_kept_while_a_phase_on_the_way_up_takes_its_time(live, phase: str) -> None:
    begun = time.monotonic()
    lived = live(flags={"max": "3s"}, acts={phase: lambda: time.sleep(60)})
    assert lived.code == 7
    assert time.monotonic() - begun < 55
    assert lived.machine.calls[-2:] == ["down", "proof"]
    assert "the deadline of" in lived.stderr and f"still at: {phase_name(phase)}" in lived.stderr


def test_a_runtime_that_fails_ends_the_run_and_says_which_part(live) -> None:
    def broken(machine: PretendMachine) -> None:
        machine.phase = "failed"

    lived = live((sys.executable, "-c", "import time; time.sleep(600)"), prepare=broken)
    assert lived.code == 6
    assert "out of memory" in lived.stderr
    assert "--which trainer" in lived.stderr


def test_a_runtime_that_is_gone_ends_the_run_and_says_why(live, tmp_path: Path) -> None:
    started = tmp_path / "started"

    def vanish(machine: PretendMachine) -> None:
        _once(started.exists, machine.down)

    program = (sys.executable, "-c", f"import time; open({str(started)!r}, 'w'); time.sleep(600)")
    lived = live(program, prepare=vanish)
    assert lived.code == 6
    assert "the runtime ended by itself" in lived.stderr
    assert "its supervisor ended" in lived.stderr


def test_the_token_is_in_no_file_once_the_run_is_over(live) -> None:
    lived = live((sys.executable, "-c", "pass"))
    assert len(lived.machine.token) > 30
    for path in lived.folder.rglob("*"):
        if path.is_file():
            assert lived.machine.token not in path.read_text(errors="replace"), path


def test_a_name_that_lives_is_refused_before_anything_starts(live) -> None:
    refused: list[LaunchError] = []

    def again() -> None:
        try:
            live(flags={"name": "dev"})
        except LaunchError as error:
            refused.append(error)

    live(flags={"name": "dev"}, acts={"push": again})
    assert refused[0].exit_code == 2
    assert "dev" in refused[0].message


def test_g23_a_runtime_that_freezes_is_said_and_ends_the_run(live, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers once, then accepts questions and says nothing. The bounds are shortened."""
    monkeypatch.setattr("launcher.run.runtime_monitor._ANSWER_SECONDS", 1.0)
    monkeypatch.setattr("launcher.base.timeout_budget.MIN_SECONDS", 1.0)
    asked: list[float] = []
    over = threading.Event()

    def freeze() -> None:
        asked.append(time.monotonic())
        if len(asked) > 1:
            over.wait(30)

    lived = live((sys.executable, "-c", "import time; time.sleep(600)"), acts={"status": freeze})
    over.set()
    assert lived.code == 6
    assert "the runtime no longer answers" in lived.stderr
    troubles = [item["trouble"] for item in lived.objects if item["event"] == "status" and item["trouble"]]
    assert troubles and troubles[0].startswith("no answer for")
