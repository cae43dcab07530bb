"""adapter_folder.py: `--model ADAPTER_FOLDER` is its base with that adapter, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.base import embedded_models
from launcher.base.errors import LaunchError, PreflightError, UsageError
from launcher.base.home import Home
from launcher.config import preflight, request_validation, resume_source, setting_sources
from launcher.models import adapter_folder
from launcher.records.records import RecordStore
from launcher.results import durable
from launcher.types.plan import make_plan
from launcher.types.settings import Settings
from runtime.shared.peft_format import portable_name
from tests.support.adapters import write

TINY = embedded_models.folder_of("tiny")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "data", tmp_path / "config", tmp_path / "cache")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that everything is typed in; what a run needs besides is there."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(preflight, "check_runtime_environment", lambda *_: None)
    return folder


def asked(home: Home, model: str, *sets: str) -> tuple[Settings, str]:
    """The settings, and where the model is."""
    read = request_validation.parse_request({"model": model}, sets, None, (), home)
    return read.settings, request_validation.validate(read, home)


def refusal(home: Home, model: str, *sets: str) -> LaunchError:
    with pytest.raises(LaunchError) as caught:
        asked(home, model, *sets)
    return caught.value


def test_an_adapters_folder_is_its_base_with_that_adapter(home: Home, project: Path) -> None:
    folder = write(project / "adapter", rank=8, lora_alpha=4)
    settings, model_path = asked(home, "adapter")
    assert (settings.model, model_path, make_plan(settings).model) == ("tiny", str(TINY), "tiny")
    assert settings.adapter is not None and settings.adapter.folder == folder
    assert (settings.runtime["train.lora.rank"], settings.runtime["train.lora.alpha"]) == (8, 4.0)
    assert settings.values["train.lora.rank"].source == "train.lora.rank of the adapter adapter"
    assert settings.runtime["train.learning_rate"] == 2e-3, "the embedded model learns with its own settings"
    assert asked(home, "adapter", "train.lora.rank=8")[0].adapter is not None
    assert asked(home, "tiny")[0].adapter is None


def test_the_base_may_be_a_folder_of_the_users_or_a_hub_name(
    home: Home, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = project / "models" / "mine"
    mine.parent.mkdir()
    mine.symlink_to(TINY)
    for name in (str(mine), "models/mine"):
        folder = write(project / "adapter", base_model_name_or_path=name)
        assert asked(home, str(folder))[1] == str(mine)

    of_hub = adapter_folder.find_adapter(
        str(write(project / "c", base_model_name_or_path="Qwen/Qwen2.5-0.5B"))
    )
    assert of_hub is not None and of_hub.base == "Qwen/Qwen2.5-0.5B"


def test_the_results_of_a_run_on_a_folder_of_the_users_are_of_that_folder(home: Home, project: Path) -> None:
    mine = project / "models" / "mine"
    mine.parent.mkdir()
    mine.symlink_to(TINY)
    store = RecordStore(home)
    record = store.create(name=None, details={"model_path": str(mine)})
    folder = write(store.folder(record.id) / "results" / "adapter", base_model_name_or_path="mine")
    assert asked(home, str(folder))[1] == str(mine)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"base_model_name_or_path": None}, "does not name its base model"),
        ({"base_model_name_or_path": "/home/somebody/slipway/models/m"}, "neither a hub name nor a folder"),
        ({"base_model_name_or_path": "mine"}, "neither a hub name nor a folder"),
        ({"r": None}, "so it is not a LoRA (peft_type 'LORA')"),
        ({"peft_type": "IA3"}, "of the kind IA3, only LORA"),
        ({"use_dora": True}, "DoRA"),
        ({"target_modules": ["c_attn"]}, "no layer of its base is called c_attn"),
        ({"target_modules": None}, "lists no target_modules by name"),
        ({"target_modules": ".*_proj"}, "lists no target_modules by name"),
    ],
)
def test_g11_an_adapter_that_cannot_be_trained_on_is_refused_before_it_costs(
    home: Home, project: Path, changes: dict[str, Any], why: str
) -> None:
    folder = write(project / "adapter", **changes)
    error = refusal(home, "adapter")
    assert isinstance(error, PreflightError) and error.exit_code == 3
    assert error.message == f"the adapter {folder} cannot be used"
    assert why in str(error.why) and error.hint


def test_an_adapter_is_trained_on_with_the_layers_and_the_scale_that_are_its_own(
    home: Home, project: Path
) -> None:
    write(project / "adapter", rank=8, target_modules=["v_proj", "q_proj"], use_rslora=True)
    settings, _ = asked(home, "adapter")
    assert settings.runtime["train.lora.target_modules"] == ("q_proj", "v_proj")
    assert settings.runtime["train.lora.use_rslora"] is True
    assert settings.values["train.lora.use_rslora"].source == "train.lora.use_rslora of the adapter adapter"
    error = refusal(home, "adapter", "train.lora.use_rslora=false")
    assert "use_rslora=true" in error.message and "keeps its own" in str(error.why)


@pytest.mark.parametrize("damage", ["none", "bin", "cut", "layer", "rank", "config", "list"])
def test_g11_an_adapter_whose_files_are_not_it_is_refused_before_it_costs(
    home: Home, project: Path, damage: str
) -> None:
    folder = write(project / "adapter")
    weights = folder / "adapter_model.safetensors"
    if damage in ("none", "bin"):
        weights.unlink()
        if damage == "bin":
            (folder / "adapter_model.bin").write_bytes(b"pickle")
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "layer":
        content = weights.read_bytes()
        weights.write_bytes(content.replace(b"layers.0.mlp.up_proj", b"layers.9.mlp.up_proj"))
    elif damage == "rank":
        write(project / "other", rank=8)
        (project / "other" / weights.name).replace(weights)
    else:
        (folder / "adapter_config.json").write_text("{" if damage == "config" else "[]")
    why = {
        "none": "it has no adapter_model.safetensors",
        "bin": "weights in other formats are not supported",
        "cut": "cut short",
        "layer": "tensors do not fit tiny, such as base_model.model.model.layers.0.mlp.up_proj.lora_A",
        "rank": "do not fit tiny",
        "config": "cannot be read",
        "list": "not a JSON object",
    }[damage]
    assert why in str(refusal(home, "adapter").why)


def test_g11_another_rank_than_the_adapters_is_refused_with_the_line_that_works(
    home: Home, project: Path
) -> None:
    folder = write(project / "adapter", rank=8)
    error = refusal(home, "adapter", "train.lora.rank=16")
    assert error.message == f"the adapter {folder} has rank 8 and alpha 16"
    assert "train.lora.rank is 16" in str(error.why)
    assert str(error.hint).startswith(f"launch --model {folder}")


def test_a_folder_with_a_model_in_it_is_that_model(project: Path) -> None:
    folder = write(project / "both")
    (folder / "model.safetensors").write_bytes(b"")
    assert adapter_folder.find_adapter("both") is None
    assert adapter_folder.find_adapter("nowhere") is None
    assert adapter_folder.find_adapter("Qwen/Qwen2.5-0.5B") is None


def test_g21_a_resumed_run_goes_on_from_its_checkpoints_not_from_an_adapter(
    home: Home, project: Path
) -> None:
    write(project / "adapter")
    first, model_path = asked(home, "adapter")
    store = RecordStore(home)
    details = resume_source.record_details(first, model_path)
    assert details["adapter"] == str(project / "adapter")
    record = store.create(name=None, details=details)

    again = resume_source.merge_settings(setting_sources.load(home=home), record)
    assert (again.model, again.adapter) == ("tiny", None)
    assert again.runtime["train.lora.rank"] == 16
    with pytest.raises(UsageError, match="cannot be resumed with the adapter"):
        resume_source.merge_settings(setting_sources.load({"model": "adapter"}, home=home), record)


def test_the_adapter_goes_to_a_new_machine_and_is_kept_at_home(project: Path, tmp_path: Path) -> None:
    folder = write(project / "adapter")
    (folder / "README.md").write_text("not for a machine")
    results, state_dir = tmp_path / "results", tmp_path / "machine"
    durable.save_initial_adapter(results, folder)
    assert durable.restore(results, state_dir) == 0
    for place in (results, state_dir):
        assert sorted(path.name for path in (place / "start").iterdir()) == [
            "adapter_config.json", "adapter_model.safetensors",
        ]  # fmt: skip
        weights = place / "start" / "adapter_model.safetensors"
        assert weights.read_bytes() == (folder / "adapter_model.safetensors").read_bytes()
    assert not (state_dir / "rewound.json").exists()
    with pytest.raises(PreflightError, match="cannot copy the adapter"):
        durable.save_initial_adapter(results, project / "nowhere")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("tiny", "tiny"),
        ("/home/me/models/mine", "mine"),
        ("/home/me/models/mine/", "mine"),
        ("../mine", "mine"),
        ("/h/hub/models--Qwen--Qwen2.5-0.5B-Instruct/snapshots/0a1b2c", "Qwen/Qwen2.5-0.5B-Instruct"),
    ],
)
def test_a_base_is_named_as_it_is_on_any_machine(model: str, name: str) -> None:
    assert portable_name(model) == name
