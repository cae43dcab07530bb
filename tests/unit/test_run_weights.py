"""run_weights.py and from_option.py: what `RUN@STEP` means, for `--from` and for `launch export`."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from launcher.base import embedded_models
from launcher.base.errors import LaunchError, UsageError
from launcher.base.home import Home
from launcher.cli import export_verb
from launcher.config import preflight, request_validation
from launcher.console.output import Output
from launcher.records.records import RecordStore, RunRecord
from launcher.results import run_weights
from runtime import bootstrap
from runtime.shared.language_model import OTHER_MODULES
from tests.support import committed
from tests.support.adapters import write

TINY = str(embedded_models.folder_of("tiny"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setattr(preflight, "check_runtime_environment", lambda *_: None)
    monkeypatch.setenv("LAUNCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return Home.find()


@pytest.fixture
def store(home: Home) -> RecordStore:
    return RecordStore(home)


@pytest.fixture
def run(store: RecordStore) -> RunRecord:
    """A run on the embedded model with the steps 1, 2 and 3 on its machine here; 2 is an optimizer's best."""
    details = {"settings": {"model": "tiny"}, "model_path": TINY}
    record = store.create(name="demo", details=details)
    machine = store.folder(record.id) / "machine"
    for step in (1, 2, 3):
        folder = committed.commit(machine, step)
        write(folder / "adapter", rank=8, lora_alpha=4.0)
        committed.write_manifest(folder, step)
    committed.name_best(machine, 2, "compile")
    return record


def checkpoint(store: RecordStore, run: RunRecord, step: int) -> Path:
    return store.folder(run.id) / "machine" / "checkpoints" / f"step-{step:06d}"


@pytest.mark.parametrize(
    ("text", "step"),
    [("demo", 3), ("demo@1", 1), ("demo@v2", 2), ("demo@step-000002", 2), ("demo@best", 2)],
)
def test_b19_a_runs_weights_are_named_by_step_or_as_its_best(
    store: RecordStore, run: RunRecord, text: str, step: int
) -> None:
    found = run_weights.find_weights(store, text)
    assert (found.step, found.label) == (step, f"demo@{step}")
    assert found.folder == checkpoint(store, run, step) / "adapter"
    assert run_weights.find_weights(store, text.replace("demo", run.id)).folder == found.folder


def test_b19_what_is_damaged_is_passed_over_and_what_is_durable_stands_in(
    store: RecordStore, run: RunRecord
) -> None:
    durable = store.folder(run.id) / "results" / "durable" / "step-000003"
    shutil.copytree(checkpoint(store, run, 3), durable)
    weights = checkpoint(store, run, 3) / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert run_weights.find_weights(store, "demo").folder == durable / "adapter"
    shutil.rmtree(durable)
    assert run_weights.find_weights(store, "demo").step == 2


def test_b19_what_came_home_of_a_machine_that_is_gone_is_found(store: RecordStore, run: RunRecord) -> None:
    results = store.folder(run.id) / "results"
    for name, step in (("adapter", 3), ("best", 2)):
        shutil.copytree(checkpoint(store, run, step) / "adapter", results / name)
        (results / name / "state.json").write_text(json.dumps({"step": step}))
    shutil.rmtree(store.folder(run.id) / "machine")
    assert run_weights.find_weights(store, "demo").folder == results / "adapter"
    assert run_weights.find_weights(store, "demo@best").folder == results / "best"


@pytest.mark.parametrize("text", ["demo@", "demo@newest", "demo@-1", "demo@7", "nobody@1", "demo@1@2"])
def test_b19_a_step_that_is_not_here_is_refused_with_those_that_are(
    store: RecordStore, run: RunRecord, text: str
) -> None:
    with pytest.raises(UsageError) as caught:
        run_weights.find_weights(store, text)
    assert caught.value.hint and caught.value.hint.startswith("launch status")
    if text == "demo@7":
        assert caught.value.why and "1, 2, 3" in caught.value.why


def test_b19_a_run_begins_with_what_another_has_learned(
    home: Home, store: RecordStore, run: RunRecord
) -> None:
    settings = request_validation.parse_request({"from": "demo@2"}, (), None, (), home).settings
    assert settings.adapter is not None and settings.model == "tiny"
    assert settings.adapter.folder == checkpoint(store, run, 2) / "adapter"
    assert settings.values["model"].source == "--from demo@2"
    assert (settings.runtime["train.lora.rank"], settings.runtime["train.lora.alpha"]) == (8, 4.0)


@pytest.mark.parametrize("other", ["model", "resume"])
def test_b19_from_says_alone_what_a_run_begins_with(home: Home, run: RunRecord, other: str) -> None:
    with pytest.raises(UsageError, match="--from cannot be used with"):
        request_validation.parse_request({"from": "demo", other: "demo"}, (), None, (), home)


def test_b19_the_base_of_a_run_on_a_folder_is_found_from_any_of_its_checkpoints(
    home: Home, store: RecordStore, tmp_path: Path
) -> None:
    mine = tmp_path / "models" / "mine"
    shutil.copytree(embedded_models.folder_of("tiny"), mine)
    record = store.create(name="own", details={"settings": {"model": str(mine)}, "model_path": str(mine)})
    folder = committed.commit(store.folder(record.id) / "machine", 4)
    write(folder / "adapter", base_model_name_or_path="mine")
    committed.write_manifest(folder, 4)
    assert request_validation.parse_request({"from": "own"}, (), None, (), home).settings.model == str(mine)


def test_b19_an_adapter_is_exported_whole_and_names_its_base(
    store: RecordStore, run: RunRecord, tmp_path: Path
) -> None:
    assert export_verb.export(Output(), "demo@best", "out/adapter", False, None, None) == 0
    target = tmp_path / "out" / "adapter"
    said = json.loads((target / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == TINY
    written = (target / "adapter_model.safetensors").read_bytes()
    assert written == (checkpoint(store, run, 2) / "adapter" / "adapter_model.safetensors").read_bytes()
    assert "step 2" in (target / "README.md").read_text()
    assert [path.name for path in target.parent.iterdir()] == ["adapter"], "nothing half written is left"


def test_b19_the_line_that_serves_an_export_says_type_sampling_and_a_rank_vllm_has(
    store: RecordStore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gpu = {
        "settings": {"model": "tiny", "gpus": "H100:1"},
        "model_path": TINY,
    }
    folder = committed.commit(store.folder(store.create(name="odd", details=gpu).id) / "machine", 1)
    write(folder / "adapter", rank=12)
    committed.write_manifest(folder, 1)
    assert export_verb.export(Output(as_json=True), "odd", "out/my adapter", False, None, None) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["serve"] in (tmp_path / "out" / "my adapter" / "README.md").read_text()
    assert shlex.split(said["serve"]) == [
        "vllm", "serve", TINY, "--dtype", "bfloat16",
        "--generation-config", "vllm", "--enable-lora", "--max-lora-rank", "16",
        "--lora-modules", f"policy={said['into']}",
    ]  # fmt: skip


def test_c66_an_export_of_a_multimodal_models_adapter_says_how_it_is_served_and_loaded(
    store: RecordStore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tiny = {"settings": {"model": "tiny"}, "model_path": TINY}
    folder = committed.commit(store.folder(store.create(name="seeing", details=tiny).id) / "machine", 1)
    write(folder / "adapter", exclude_modules=OTHER_MODULES)
    committed.write_manifest(folder, 1)
    assert export_verb.export(Output(as_json=True), "seeing", "out/adapter", False, None, None) == 0
    assert "--language-model-only" in json.loads(capsys.readouterr().out)["serve"]
    assert "AutoModelForImageTextToText" in (tmp_path / "out" / "adapter" / "README.md").read_text()


def test_s06_a_merge_imports_nothing_of_the_users_folder(
    run: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Python is one without torch here: of what it says the last line is of its own imports."""
    monkeypatch.setattr(bootstrap, "ensure_environment", lambda *words, **named: Path(sys.executable))
    for name in ("argparse", "torch", "runtime", "launcher"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user was imported')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError) as caught:
        export_verb.export(Output(), "demo", "new", True, None, None)
    assert caught.value.why == "ModuleNotFoundError: No module named 'torch'"


@pytest.mark.parametrize(
    ("to", "merge", "dtype"), [("full", False, None), ("new", False, "float32"), ("new", True, "int8")]
)
def test_b19_an_export_writes_over_nothing_and_refuses_what_it_cannot_write(
    run: RunRecord, tmp_path: Path, to: str, merge: bool, dtype: str | None
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(LaunchError) as caught:
        export_verb.export(Output(), "demo", to, merge, dtype, None)
    assert caught.value.exit_code == 2
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]
    assert not (tmp_path / "new").exists()
