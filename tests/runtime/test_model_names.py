"""What a model's name means on a run (A7): its own model's is the policy, a job's a version, others 404."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.gateway.gateway import build_app, build_components
from runtime.gateway.http.openai_errors import ApiError
from runtime.gateway.versions.versions import Versions
from runtime.shared.model_names import ModelNames
from runtime.shared.runtime_config import RuntimeConfig

HUB = "Qwen/Qwen2.5-1.5B-Instruct"


def versions(tmp_path: Path, names: ModelNames | None = None) -> Versions:
    """A run that serves version 5, and has all before it."""
    own = names or ModelNames(HUB, HUB)
    kept = dict.fromkeys(range(1, 6), 0)
    made = Versions(tmp_path / "serving.json", "policy", keep=2, kept=lambda: kept, names=own)
    made.move(5, 5)
    return made


@pytest.mark.parametrize(
    "name",
    ["policy", "openai/policy", f"openai/arbor:{HUB}", f"arbor:{HUB}", HUB, HUB.lower(), f"{HUB}:latest",
     f"/home/me/models/{HUB.rpartition('/')[2]}/", f"~/{HUB.rpartition('/')[2]}"],
)  # fmt: skip
def test_a07_the_runs_own_model_by_its_name_is_the_policy(tmp_path: Path, name: str) -> None:
    served = versions(tmp_path).resolve(name)
    assert (served.version, served.name) == (5, "policy@v5")


@pytest.mark.parametrize(
    "name", ["Qwen2.5-1.5B-Instruct", HUB, f"arbor:{HUB}", "/models/Qwen2.5-1.5B-Instruct"]
)
def test_a07_a_model_in_a_folder_is_known_by_the_folders_name(tmp_path: Path, name: str) -> None:
    own = ModelNames("Qwen2.5-1.5B-Instruct", "/srv/Qwen2.5-1.5B-Instruct")
    assert versions(tmp_path, own).resolve(name).version == 5


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen3-8B", "openai/arbor:Qwen/Qwen3-8B", "gpt-4.1-mini", "Qwen2.5-1.5B-Instruct", "Other/" + HUB,
     "meta/Qwen2.5-1.5B-Instruct", "arbor:", "", "@v3", f"{HUB}@", f"{HUB}@v", f"{HUB}@v6", f"{HUB}@best"],
)  # fmt: skip
def test_a07_another_model_is_a_404_that_names_the_runs(tmp_path: Path, name: str) -> None:
    with pytest.raises(ApiError) as refused:
        versions(tmp_path).resolve(name)
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    assert f"This run has `policy` (`{HUB}` means it too)" in refused.value.message


@pytest.mark.parametrize("form", ["@v3", "@3"])
@pytest.mark.parametrize("name", ["policy", f"arbor:{HUB}", HUB])
def test_b11_a_step_behind_a_name_is_that_steps_version(tmp_path: Path, name: str, form: str) -> None:
    made = versions(tmp_path)
    assert made.resolve(name + form).version == 3
    assert made.checkpoint(name + form) == "step-000003"


def test_b11_a_name_that_a_client_gave_the_policy_has_its_steps_too(tmp_path: Path) -> None:
    """As openpipe-art asks for the model of a step: `get_inference_name(3)` is `agent@3`."""
    made = versions(tmp_path)
    made.also = {"agent": "policy", "old": "policy@v2"}.get
    for name, version in {"agent": 5, "agent@3": 3, "openai/agent@v3": 3, "agent@0": 0, "old": 2}.items():
        assert made.resolve(name).version == version
    assert made.checkpoint("agent@3") == "step-000003"
    for name in ("agent@6", "agent@latest", "agent@", "old@3", "stranger@3", "@3"):
        with pytest.raises(ApiError) as refused:
            made.resolve(name)
        assert (refused.value.status, refused.value.code) == (404, "model_not_found")
        assert f"`{name}`" in refused.value.message


def test_b11_an_evicted_version_is_a_404_and_one_in_flight_stays(tmp_path: Path) -> None:
    kept = dict.fromkeys(range(1, 6), 0)
    made = Versions(tmp_path / "s.json", "policy", keep=1, kept=lambda: kept, names=ModelNames(HUB, HUB))
    made.also = {"agent": "policy"}.get
    made.move(3, 3)
    asked = made.resolve("agent@3")
    made.acquire(asked.version)
    for version in (4, 5):
        made.move(version, version)
        del kept[version - 2]
    assert (made.resolve("agent").version, asked.name) == (5, "policy@v3")
    assert not made.retire(3), "a rollout in flight keeps its version"
    assert made.resolve("agent@3").version == 3
    made.release(3)
    del kept[1]
    assert made.retire(3)
    with pytest.raises(ApiError) as refused:
        made.resolve("agent@3")
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    assert "`policy@v3` was served once, but its weights are no longer kept" in refused.value.message
    assert "policy@v5" in refused.value.message


def test_c55_a_number_that_was_given_twice_is_refused_under_every_name(tmp_path: Path) -> None:
    own, kept = ModelNames(HUB, HUB), dict.fromkeys(range(1, 6), 0)
    made = Versions(tmp_path / "s.json", "policy", 2, lambda: kept, lambda _: "ab" * 32, 2, own)
    made.move(5, 5)
    for name in ("policy@v3", "policy@3", f"{HUB}@v3", f"arbor:{HUB}@3"):
        with pytest.raises(ApiError) as refused:
            made.resolve(name)
        assert refused.value.status == 409
    assert made.resolve(f"{HUB}@v3+{'ab' * 6}").version == 3


def test_a04_the_route_holds_train_kwargs_against_the_run(tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    model = tmp_path / "phi"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "phi3"}')
    config = RuntimeConfig(
        run_id="r", model_path=str(model), state_dir=str(tmp_path / "state"), socket_dir=str(tmp_path)
    )
    client = TestClient(build_app(build_components(config)))
    kwargs = {"learning_rate": 1e-5, "lora_config": {"r": 8, "target_modules": ["qkv_proj"]}, "lerning": 1}
    answer = client.post("/slipway/train_kwargs", json={"train_kwargs": kwargs, "strict": True}).json()
    assert answer["settings"]["learning_rate"] == 1e-5
    layers = "o_proj,gate_up_proj,down_proj"
    assert [(it["key"], it["launch"]) for it in answer["refusals"]] == [
        ("lora_config.r", "--set train.lora.rank=8"),
        ("lora_config.target_modules", "--set train.lora.target_modules=qkv_proj"),
        ("lerning", ""),
    ]
    assert layers in answer["refusals"][1]["why"]
    lax = client.post("/slipway/train_kwargs", json={"train_kwargs": {"lerning": 1}}).json()
    assert (lax["refusals"], len(lax["notes"])) == ([], 1)
    raw = '{"train_kwargs": {"learning_rate": NaN}}'
    nan = client.post(
        "/slipway/train_kwargs", content=raw, headers={"content-type": "application/json"}
    ).json()
    assert nan["refusals"][0]["why"] == "expected a number, not nan"
    assert client.post("/slipway/train_kwargs", json={"train_kwargs": {}, "steps": 0}).status_code == 400
