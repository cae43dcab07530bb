"""resume_point.py, resume_source.py: which run is taken up, from which step, as what, and what is refused."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.backends.local_machine import LocalMachine
from launcher.base.errors import CapacityError, LaunchError, PreflightError, UsageError
from launcher.base.home import Home
from launcher.base.log import close_log
from launcher.base.processes import ProcessId
from launcher.config import resume_source
from launcher.config.setting_sources import load
from launcher.console.output import Output
from launcher.records.records import RecordStore, RunRecord
from launcher.results import durable, results_copy
from launcher.run import launching
from launcher.run.launching import launch_run
from launcher.run.resume_point import ResumePoint, prepare_resume
from launcher.run.run import Run
from launcher.run.run_request import RunRequest
from launcher.teardown import take_down
from launcher.types.plan import make_plan
from launcher.types.settings import SETTINGS, Settings
from runtime.shared.start_adapter_layout import FILES
from tests.support.committed import commit
from tests.support.pretend_machine import PretendMachine
from tests.support.waiting import wait_until


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home", tmp_path / "config", tmp_path / "cache")


@pytest.fixture
def store(home: Home) -> RecordStore:
    return RecordStore(home)


@pytest.fixture
def settings(home: Home, tmp_path: Path) -> Callable[..., Settings]:
    def load_here(*sets: str, environ: dict[str, str] | None = None, **flags: Any) -> Settings:
        return load(flags, sets, environ=environ or {}, folder=tmp_path, home=home)

    return load_here


def ended(store: RecordStore, begun: Settings | None = None, **fields: Any) -> RunRecord:
    """A run that is over; with the settings it was begun with."""
    details = resume_source.record_details(begun, "/models/mine") if begun else {}
    record = store.create(name="dev", command=("python", "x.py"), details=details)
    return store.update(record.id, state="verified", launch=None, **fields)


def find(store: RecordStore, word: str = "dev", said: list[str] | None = None) -> ResumePoint:
    def machine(record: RunRecord) -> LocalMachine:
        return LocalMachine(record.id, store.folder(record.id) / "machine", store.runs)

    record = resume_source.find(store, word)
    return prepare_resume(store, record, machine, (said if said is not None else []).append)


# ----------------------------------------------------------------- which run, which step


def test_a_run_goes_on_after_the_newest_step_its_machine_has_whole(store: RecordStore) -> None:
    record = ended(store)
    machine = store.folder(record.id) / "machine"
    for step in (1, 2, 3):
        commit(machine, step)
    (machine / "checkpoints" / "step-000003" / "optimizer.safetensors").write_bytes(b"cut")
    found = find(store, record.id)
    assert (found.record.id, found.step, found.rewinds) == (record.id, 2, False)
    assert found.describe() == "resuming after step 2"


def test_where_the_machine_is_gone_it_is_rewound_to_the_durable_step(store: RecordStore) -> None:
    record = ended(store)
    folder = store.folder(record.id)
    commit(folder / "machine", 7)
    results_copy.make_durable(folder / "machine", folder / "results")
    shutil.rmtree(folder / "machine")
    found = find(store)
    assert (found.step, found.rewinds) == (7, True)
    assert found.describe() == "resuming after step 7, the last durable one: the machine's state is lost"


def test_g21_without_a_durable_step_a_run_goes_back_to_the_adapter_that_it_began_with(
    store: RecordStore, tmp_path: Path
) -> None:
    record = ended(store)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in FILES:
        (adapter / name).write_text("{}")
    durable.save_initial_adapter(store.folder(record.id) / "results", adapter)
    found = find(store)
    assert (found.step, found.rewinds) == (0, True)
    assert found.describe() == "resuming with the adapter it started with: the machine's state is lost"


@pytest.mark.process
@pytest.mark.parametrize("was_ready", [True, False])
def test_c55_a_run_taken_up_at_its_adapter_is_a_rewind_where_it_was_ever_ready(
    store: RecordStore, home: Home, settings: Callable[..., Settings], tmp_path: Path, was_ready: bool
) -> None:
    record = ended(store, machine={"kind": "local"}, url="http://127.0.0.1:1" if was_ready else None)

    def no_further() -> None:
        raise PreflightError("no further", "the test has seen enough", None)

    machine = PretendMachine(tmp_path / "machine", {"upload_checkpoints": no_further})
    begun = settings()
    taken_up = ResumePoint(record, 0, rewinds=True)
    request = RunRequest(begun, make_plan(begun), "/nowhere", ("true",), resumed=taken_up)
    output = Output(stdout=io.StringIO(), stderr=io.StringIO(), environ={})
    assert Run(request, home, output, lambda record, store, home: machine).execute() == 3
    close_log()
    assert (store.folder(record.id) / "results" / "durable" / "rewound.json").exists() == was_ready


def test_a_run_without_a_step_has_nothing_to_resume(store: RecordStore) -> None:
    ended(store)
    with pytest.raises(UsageError, match="nothing to resume") as refused:
        find(store)
    assert refused.value.exit_code == 2
    assert "launch -- python x.py" in str(refused.value.hint)


def test_a_run_that_lives_is_refused(store: RecordStore) -> None:
    store.create(name="dev")  # its launcher is this process
    with pytest.raises(UsageError, match="dev is live") as refused:
        find(store)
    assert refused.value.exit_code == 2
    assert "launch down dev" in str(refused.value.hint)


def test_a_guardian_that_is_at_work_is_waited_for(store: RecordStore) -> None:
    record = ended(store)
    commit(store.folder(record.id) / "machine", 1)
    guardian = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    process = ProcessId.of(guardian.pid)
    store.update(record.id, state="down", guardian=process)
    said: list[str] = []

    def finish(line: str) -> None:
        said.append(line)
        store.update(record.id, state="verified")
        assert guardian.stdin is not None
        guardian.stdin.close()
        wait_until(lambda: guardian.poll() is not None, what="it has ended")

    def machine(record: RunRecord) -> LocalMachine:
        return LocalMachine(record.id, store.folder(record.id) / "machine", store.runs)

    assert prepare_resume(store, store.load("dev"), machine, finish).step == 1
    assert said == ["dev: its guardian is still taking it down"]


def test_what_nobody_looks_after_is_ended_first(store: RecordStore) -> None:
    record = ended(store)
    machine = LocalMachine(record.id, store.folder(record.id) / "machine", store.runs)
    machine.provision()
    commit(store.folder(record.id) / "machine", 1)
    straggler = subprocess.Popen(["sleep", "600"], env={**os.environ, "SLIPWAY_RUN_ID": record.id})
    store.update(record.id, state="work", machine=machine.describe())
    assert find(store).record.state == "verified"
    assert straggler.wait(timeout=120) != 0
    assert store.load(record.id).ended_by == "resume"
    assert not Path(machine.socket_dir).exists()


# ----------------------------------------------------------------- as what it was begun


def test_the_recorded_settings_hold_whatever_files_and_variables_say_now(
    store: RecordStore, settings: Callable[..., Settings]
) -> None:
    begun = settings("train.learning_rate=3e-3", "train.pack_tokens=512", max="2h", model="/models/mine")
    record = ended(store, begun)
    again = resume_source.merge_settings(
        settings(environ={"LAUNCH_MODEL": "tiny", "LAUNCH_TRAIN__LEARNING_RATE": "1"}), record
    )
    assert (again.model, again.max_seconds, again.name) == ("/models/mine", 7200.0, "dev")
    assert (again.runtime["train.learning_rate"], again.runtime["train.pack_tokens"]) == ("3e-3", "512")
    assert again.values["train.pack_tokens"].source == "the record of dev"
    sources = record.details["sources"]
    assert (
        sources["train.pack_tokens"] == "--set train.pack_tokens"
        and sources["max"] == "--max"
        and "budget" not in sources
    )


@pytest.mark.parametrize(("rate", "bytes_per_second"), [("2MB/s", 2e6), ("none", float("inf"))])
def test_every_option_of_a_run_holds_when_it_is_taken_up(
    store: RecordStore, settings: Callable[..., Settings], rate: str, bytes_per_second: float
) -> None:
    """But its name, which is the record's, and --yes, which was said of another price."""
    assert SETTINGS.keys() - resume_source._RECORDED.keys() == {"name", "yes"}
    record = ended(store, settings(copy_rate=rate, keep_output=False, grace="30s", yes=True))
    again = resume_source.merge_settings(settings(), store.load(record.id))
    assert (again.copy_rate, again.keep_output, again.grace_seconds) == (bytes_per_second, False, 30.0)
    assert not again.yes


def test_what_is_given_anew_wins(store: RecordStore, settings: Callable[..., Settings]) -> None:
    record = ended(store, settings("train.learning_rate=3e-3", lease="5m"))
    again = resume_source.merge_settings(settings("train.learning_rate=1e-3", lease="30s"), record)
    assert again.runtime["train.learning_rate"] == "1e-3"
    assert again.lease_seconds == 30.0


@pytest.mark.parametrize("given", ["train.lora.rank=8", "train.lora.alpha=7", "dtype=bfloat16"])
def test_what_would_train_another_policy_is_refused_with_why(
    store: RecordStore, settings: Callable[..., Settings], given: str
) -> None:
    record = ended(store, settings())
    with pytest.raises(UsageError, match="cannot be resumed with") as refused:
        resume_source.merge_settings(settings(given), record)
    assert "and its checkpoints hold that policy" in str(refused.value.why)


def test_the_same_value_in_other_words_is_no_change(
    store: RecordStore, settings: Callable[..., Settings]
) -> None:
    record = ended(store, settings("train.lora.rank=16", "train.lora.alpha=16"))
    assert resume_source.merge_settings(settings("train.lora.rank=16", "train.lora.alpha=16.0"), record)


def test_a_run_keeps_its_name(store: RecordStore, settings: Callable[..., Settings]) -> None:
    record = ended(store, settings())
    with pytest.raises(UsageError, match="keeps its name"):
        resume_source.merge_settings(settings(name="other"), record)
    assert resume_source.merge_settings(settings(name="dev"), record).name == "dev"


def test_its_program_runs_in_the_folder_it_ran_in(
    store: RecordStore, settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "project"
    there.mkdir()
    monkeypatch.chdir(there)
    record = ended(store, settings())
    monkeypatch.chdir(tmp_path)
    assert resume_source.working_folder(record) == there
    there.rmdir()
    with pytest.raises(PreflightError, match="ran its program in") as refused:
        resume_source.working_folder(record)
    assert "--resume dev -- COMMAND" in str(refused.value.hint)


def test_a_run_that_another_launch_has_taken_up_meanwhile_is_left_alone(store: RecordStore) -> None:
    record = ended(store)
    store.update(record.id, state="work")
    read = resume_source.find(store, record.id)  # nobody looks after it, by now somebody does
    store.update(record.id, state="verified")
    store.reopen(record.id, command=("true",), details={})
    with pytest.raises(UsageError, match="dev is live"):
        prepare_resume(store, read, lambda _: pytest.fail("not asked"), lambda _: None)
    assert store.load(record.id).live


def test_what_a_run_of_the_first_versions_recorded_of_memory_unasked_is_planned_anew(
    store: RecordStore, settings: Callable[..., Settings]
) -> None:
    was = {"engine.kv_cache_gib": 1.0, "engine.max_num_seqs": 64, "train.pack_tokens": 8192}
    record = ended(store, settings(gpus="H100:1"))
    record = store.update(record.id, details={**record.details, "runtime": was})
    kept = resume_source.merge_settings(settings(), record).runtime
    assert "engine.kv_cache_gib" not in kept and "engine.max_num_seqs" not in kept
    assert kept["train.pack_tokens"] == 8192, "that was said"
    here = ended(store, settings())
    here = store.update(here.id, details={**here.details, "runtime": was})
    assert resume_source.merge_settings(settings(), here).runtime["engine.kv_cache_gib"] == 1.0


def test_who_kept_no_completions_keeps_no_rollouts(
    store: RecordStore, settings: Callable[..., Settings]
) -> None:
    """As a run of the time before the setting had its new name recorded it."""
    record = ended(store, settings())
    for was, now in ((0, 0), (128, None)):
        record = store.update(record.id, details={**record.details, "runtime": {"completions_per_step": was}})
        assert resume_source.merge_settings(settings(), record).runtime.get("logged_rollouts") == now


def test_a_run_that_had_no_machine_yet_may_be_taken_up_anywhere(
    store: RecordStore, settings: Callable[..., Settings]
) -> None:
    record = ended(store)
    for anywhere in (settings(), settings(gpus="H100:4")):
        resume_source.check_same_kind(anywhere, record)
    here = store.update(record.id, machine={"kind": "local"})
    with pytest.raises(UsageError, match="cannot be"):
        resume_source.check_same_kind(settings(gpus="H100:4"), here)


def test_a_run_stays_on_the_kind_of_gpus_it_was_started_on(
    store: RecordStore, settings: Callable[..., Settings]
) -> None:
    record = ended(store)
    own = store.update(record.id, machine={"kind": "local", "variant": "cuda"})
    resume_source.check_same_kind(settings(gpus="local:2"), own)
    for other, words in ((settings(), "this computer"), (settings(gpus="H100:4"), "rented GPUs")):
        with pytest.raises(UsageError, match=f"cannot be resumed on {words}$") as refused:
            resume_source.check_same_kind(other, own)
        assert "it was started on this computer's own GPUs" in (refused.value.why or "")
    here = store.update(record.id, machine={"kind": "local", "variant": "cpu"})
    with pytest.raises(UsageError, match="cannot be resumed on this computer's own GPUs"):
        resume_source.check_same_kind(settings(gpus="local"), here)


def test_what_cannot_be_had_is_refused_before_anything_of_the_earlier_run_is_ended(
    store: RecordStore, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = ended(store)
    store.update(record.id, state="work")

    def nowhere(*_: Any) -> None:
        raise CapacityError("no cloud offers it", "none has it", None)

    monkeypatch.setattr(Home, "find", lambda: home)
    monkeypatch.setattr(launching.request_validation, "validate", lambda *_: "/nowhere")
    monkeypatch.setattr(launching.pricing, "make_priced_plan", nowhere)
    monkeypatch.setattr(take_down, "take_down", lambda *_: pytest.fail("ended too early"))
    output = Output(stdout=io.StringIO(), stderr=io.StringIO(), environ={})
    with pytest.raises(CapacityError):
        launch_run({"resume": record.id}, (), None, ("true",), output)
    assert store.load(record.id).state == "work"


def test_a_mistyped_setting_is_refused_before_anything_of_the_earlier_run_is_ended(
    store: RecordStore, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = ended(store)
    store.update(record.id, state="work")
    monkeypatch.setattr(Home, "find", lambda: home)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(take_down, "take_down", lambda *_: pytest.fail("ended too early"))
    output = Output(stdout=io.StringIO(), stderr=io.StringIO(), environ={})
    for sets, flags in [(("train.lerning_rate=1",), {}), ((), {"model": "./nowhere"})]:
        with pytest.raises(LaunchError):
            launch_run({"resume": record.id, **flags}, sets, None, ("true",), output)
    assert store.load(record.id).state == "work"
