"""`launch plan` finds of the model what a run would, without a network: the plan is shown, then refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.base import embedded_models
from launcher.models import hub, known_models
from runtime.shared.architectures import check_trainable, state_of
from runtime.shared.language_model import language_model
from runtime.shared.model_shape import linear_names
from runtime.shared.projections import ATTENTION, PROJECTIONS
from tests.support.adapters import write
from tests.support.typed import Typed

pytestmark = pytest.mark.process

WHOLE = json.loads((embedded_models.folder_of("tiny") / "config.json").read_text())
LAYERS = "train.lora.target_modules"


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh computer without a network, on which no program may be started."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "CLOUDSDK_", "GCP_", "KUBECONFIG", "RUNPOD_", "HF_", "XDG_")):
            monkeypatch.delenv(name)
    (tmp_path / "user").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setattr("subprocess.Popen", lambda *words, **options: pytest.fail(f"started {words}"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the hub was asked for; it does not answer."""
    urls: list[str] = []

    def get(url: str, *words: Any) -> bytes:
        urls.append(url)
        raise OSError("no network")

    monkeypatch.setattr(hub, "_get", get)
    return urls


@pytest.fixture
def typed(tmp_path: Path) -> Typed:
    return Typed(tmp_path / "project", tmp_path / "home")


def model(folder: Path, **config: Any) -> Path:
    """The embedded model's folder with these keys in its config.json."""
    folder.mkdir(parents=True)
    for file in embedded_models.folder_of("tiny").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(WHOLE | config))
    return folder


def cut(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def damaged(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def without(pattern: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for file in folder.glob(pattern):
            file.unlink()

    return remove


REFUSED: list[tuple[dict[str, Any], Callable[[Path], None] | None, str]] = [
    ({"quantization_config": {"quant_method": "awq"}}, None, "its weights are quantized (awq)"),
    ({"model_type": "new", "auto_map": {"AutoModel": "x.Y"}}, None, "its own code (auto_map)"),
    ({"model_type": "new", "layer_types": ["linear_attention"]}, None, "passes a state along its tokens"),
    ({"model_type": "bert", "architectures": ["BertModel"]}, None, "is not a causal language model"),
    ({}, cut, "cut short"),
    ({}, without("*.safetensors"), "no *.safetensors"),
    ({}, without("tokenizer.json"), "no tokenizer in"),
    ({}, without("*template*"), "no chat template"),
    ({}, damaged, "config.json is damaged"),
    ({}, without("config.json"), "no config.json in"),
]


@pytest.mark.parametrize("gpus", ["", "--gpus H100:1"])
@pytest.mark.parametrize(("config", "damage", "why"), REFUSED, ids=lambda value: str(value)[:24])
def test_g11_a_plan_of_a_model_that_a_run_refuses_is_shown_and_refused_as_a_run_does(
    typed: Typed, config: dict[str, Any], damage: Callable[[Path], None] | None, why: str, gpus: str
) -> None:
    folder = model(typed.folder / "m", **config)
    if why.startswith("no chat"):
        (folder / "tokenizer_config.json").write_text("{}")
    if damage is not None:
        damage(folder)
    planned = typed("plan", "--model", "m", *gpus.split())
    assert planned.returncode == 3, planned.stdout
    assert planned.stdout.strip(), "the plan itself"
    what, said, hint = planned.stderr.splitlines()[-3:]
    assert what == "Error: the model m cannot be used" and why in said and hint.startswith("Hint: ")
    run = typed("--model", "m")
    assert (run.returncode, run.stderr.splitlines()[-3:-1]) == (3, [what, said])
    assert hint.startswith("Hint: launch plan ") == run.stderr.splitlines()[-1].startswith("Hint: launch ")
    assert typed("--dry-run", "--model", "m", *gpus.split()).returncode == 3
    assert "launch's table" not in planned.stderr, "a folder is no name to look up"


@pytest.mark.parametrize("words", ["--model /nonexistent", "--model /nonexistent --gpus H100:1"])
def test_g11_a_plan_of_no_model_at_all_is_refused(typed: Typed, words: str) -> None:
    done = typed("plan", *words.split())
    assert done.returncode == 3
    assert done.stderr.splitlines()[-3] == "Error: no model /nonexistent"


@pytest.mark.parametrize("gpus", ["", "--gpus H100:1"])
def test_g11_a_plan_of_a_longer_context_than_the_models_is_refused(typed: Typed, gpus: str) -> None:
    done = typed("plan", "--set", "engine.max_model_len=5000", *gpus.split())
    assert done.returncode == 3 and done.stdout.strip()
    what, why, _ = done.stderr.splitlines()[-3:]
    assert what == "Error: the context cannot be 5000 tokens" and "this model has 1024 tokens" in why
    known = typed(
        "plan", "--model", "microsoft/phi-4", "--gpus", "H100:4", "--set", "engine.max_model_len=32768"
    )
    assert known.returncode == 3 and "16384" in known.stderr


@pytest.mark.parametrize("wish", ["train.lora.rank=16", f"{LAYERS}=q_proj"])
def test_g11_a_plan_with_other_settings_than_the_adapters_is_refused(typed: Typed, wish: str) -> None:
    write(typed.folder / "adapter", rank=8)
    assert typed("plan", "--model", "adapter").returncode == 0
    for words in (["plan"], ["plan", "--gpus", "H100:1"], ["--dry-run"]):
        done = typed(*words, "--model", "adapter", "--set", wish)
        assert done.returncode == 3, done.stdout
        assert "an adapter keeps its own" in done.stderr


def test_an_adapter_that_is_trained_on_is_shown_in_the_plan(typed: Typed) -> None:
    folder = write(typed.folder / "adapter", rank=8)
    shown = f"tiny with the adapter {folder}, rank 8"
    assert shown in typed("plan", "--model", "adapter").stdout
    rented = typed("plan", "--model", "adapter", "--gpus", "H100:1")
    assert f"  model   {shown}" in rented.stdout.splitlines()
    said = json.loads(typed("plan", "--model", "adapter", "--json").stdout)
    assert (said["model"], said["adapter"]) == ("tiny", {"folder": str(folder), "rank": 8})
    assert json.loads(typed("plan", "--json").stdout)["adapter"] is None


# ------------------------------------------------------------------ without a network


def test_g26_a_plan_asks_nobody_about_a_model_that_is_not_here(typed: Typed, asked: list[str]) -> None:
    assert typed("plan", "--model", "some/model").returncode == 0
    assert asked == []
    for model_name in ("Qwen/Qwen3-8B", "some/model"):
        assert typed("plan", "--model", model_name, "--gpus", "H100:1", HF_HUB_OFFLINE="1").returncode == 0
    assert asked == []


def test_a_plan_that_the_hub_answers_is_refused_by_that_answer(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    bert = WHOLE | {"model_type": "bert", "architectures": ["BertModel"]}
    monkeypatch.setattr(hub, "_get", lambda *_: json.dumps(bert).encode())
    done = typed("plan", "--model", "some/bert", "--gpus", "H100:1")
    assert done.returncode == 3 and "BertModel is not a causal language model" in done.stderr


def test_a_model_that_was_downloaded_is_looked_at_for_a_plan(typed: Typed, asked: list[str]) -> None:
    snapshot = typed.folder / "hf" / "hub" / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"architectures": ["BertModel"]}')
    done = typed("plan", "--model", "some/model", HF_HOME=str(typed.folder / "hf"))
    assert done.returncode == 3 and "BertModel is not a causal language model" in done.stderr
    assert asked == []


def test_the_models_of_the_table_can_be_trained() -> None:
    for name in known_models._by_name():
        config = known_models.config_of(name)
        assert config is not None
        check_trainable(config)
        alone = language_model(config)
        assert linear_names(alone) or state_of(alone), name  # hybrids have others beside those with LoRA


# ------------------------------------------------------------------ layers with LoRA


@pytest.mark.parametrize("words", ["plan", "--dry-run", "plan --gpus H100:1", ""])
def test_g11_layers_that_the_model_does_not_have_are_all_named_before_anything_starts(
    typed: Typed, words: str
) -> None:
    done = typed(*words.split(), "--set", f"{LAYERS}=q_prj,v_proj,nothing")
    assert done.returncode == 2, done.stderr
    assert bool(done.stdout) == bool(words), "a plan is shown"
    what, why, hint = done.stderr.splitlines()[-3:]
    assert what == f"Error: --set {LAYERS}: tiny has no q_prj, nothing"
    assert why == f"  its linear layers are {', '.join(PROJECTIONS)}"
    again = " ".join(["launch", *words.split(), f"--set {LAYERS}=q_proj,v_proj"])
    assert hint == f"Hint: {again}"


def test_g11_such_layers_in_a_file_are_3_and_a_hub_models_are_known_from_the_table(typed: Typed) -> None:
    (typed.folder / "launch.toml").write_text(f'{LAYERS} = "gate_proj"\n')
    done = typed("plan", "--model", "microsoft/phi-4", "--gpus", "H100:4")
    assert done.returncode == 3
    what, why, _ = done.stderr.splitlines()[-3:]
    assert what == f"Error: launch.toml: {LAYERS}: microsoft/phi-4 has no gate_proj"
    assert "qkv_proj" in why and "lm_head" not in why


def test_layers_of_a_family_whose_names_are_not_known_are_the_trainers_to_refuse(typed: Typed) -> None:
    model(typed.folder / "m", model_type="gpt_neox", architectures=["GPTNeoXForCausalLM"])
    assert typed("plan", "--model", "m", "--set", f"{LAYERS}=query_key_value").returncode == 0


def test_of_experts_attention_can_have_lora_and_layers_without_them_the_rest() -> None:
    experts = WHOLE | {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 8}
    assert linear_names(experts) == ATTENTION
    assert set(linear_names(experts | {"mlp_only_layers": [0]}) or ()) == set(PROJECTIONS)
