"""memory_fit.py, memory_table.py, and what a rented run is told of its memory: shown, refused, handed on."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.base.errors import PreflightError
from launcher.base.home import Home
from launcher.config import memory_fit, resume_source, setting_sources
from launcher.config.runtime_config import build
from launcher.models import model_config
from launcher.run.rented_run import SHARED_FRACTION, runtime_overrides
from launcher.types.plan import MEMORY_SETTINGS, Plan, RentedGpus
from launcher.types.settings import Settings
from tests.support.typed import Typed

_POPEN = subprocess.Popen
ONE = RentedGpus("H100:1", ("aws",), 10, None, train_gpus=1, infer_gpus=1)
FOUR = RentedGpus("H100:4", ("aws",), 10, None, train_gpus=1, infer_gpus=3)
PLACES = {"run_id": "r", "model_path": "m", "device": "cuda", "state_dir": "s", "socket_dir": "d"}


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh computer without a network: no account, no catalog, no downloaded model."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "CLOUDSDK_", "GCP_", "KUBECONFIG", "RUNPOD_", "HF_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "user").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setattr("subprocess.Popen", lambda *words, **options: pytest.fail(f"started {words}"))


@pytest.fixture
def typed(tmp_path: Path) -> Typed:
    return Typed(tmp_path / "project", tmp_path / "home")


def settings(tmp_path: Path, model: str, *sets: str, gpus: str = "H100:1") -> Settings:
    home = Home(tmp_path / "data", tmp_path / "config", tmp_path / "cache")
    return setting_sources.load({"model": model, "gpus": gpus}, sets, environ={}, folder=tmp_path, home=home)


def fitted(tmp_path: Path, model: str, *sets: str, rented: RentedGpus = ONE) -> RentedGpus:
    memory, _ = memory_fit.plan_memory(settings(tmp_path, model, *sets, gpus=rented.gpus), rented, "H100")
    return replace(rented, memory=memory)


# ------------------------------------------------------------------ what is shown


@pytest.mark.process
def test_a_plan_of_a_known_model_is_a_table_of_its_memory_on_a_fresh_computer_offline(typed: Typed) -> None:
    done = typed("plan", "--model", "Qwen/Qwen3-8B", "--gpus", "H100:4")
    assert done.returncode == 0, done.stderr
    table = done.stdout.splitlines()
    assert table[0].startswith("Fits: 4×H100 on lambda, $16.36/h, deadline 4h: at most $"), "n17: first"
    assert "Change: fetch the prices: launch plan --model Qwen/Qwen3-8B --gpus H100:4" in table[0]
    assert "  MEMORY OF A GPU THAT TRAINS, AND OF ONE THAT SERVES" in table
    named = [line.split()[0] for line in table if line.startswith("    ") and "GiB" in line]
    assert named == [
        "weights", "adapter", "gradients", "AdamW", "kept", "working", "fragmentation", "CUDA",
        "weights", "LoRA", "a", "CUDA", "graphs", "cache",
    ]  # fmt: skip
    assert table[-2].endswith("are planned: fits, by arithmetic that no GPU has confirmed")
    assert table[-1].startswith("  planned  train.activation_checkpointing=true train.pack_tokens=16384 ")
    assert "memory is planned for Qwen/Qwen3-8B's shape as launch knew it on 2026-" in done.stderr

    memory = json.loads(typed("plan", "--model", "Qwen/Qwen3-8B", "--gpus", "H100:4", "--json").stdout)[
        "rented"
    ]["memory"]
    assert memory["short"] is None and memory["activation_checkpointing"] is True
    assert {line["name"] for line in memory["trainer"]} > {"weights", "kept"}


@pytest.mark.process
def test_n17_what_cannot_fit_is_shown_and_refused_with_what_would(typed: Typed) -> None:
    done = typed("plan", "--model", "Qwen/Qwen3-32B", "--gpus", "H100:1")
    assert done.returncode == 3
    first = done.stdout.splitlines()[0]
    assert first.startswith("Does not fit: 1×H100 on ") and "$3.29/h" in first
    assert first.endswith(". Change: --gpus H100:2")
    message, why, hint = done.stderr.splitlines()[-3:]
    assert message == "Error: Qwen/Qwen3-32B does not fit H100:1"
    taken = dict(re.findall(r"^  (training|serving) +([\d.]+ GiB)", done.stdout, re.MULTILINE))
    assert why.startswith(f"  on one GPU training takes {taken['training']} and serving {taken['serving']}, ")
    assert hint == "Hint: launch plan --model Qwen/Qwen3-32B --gpus H100:2  # or H200:1"
    assert typed("plan", "--model", "Qwen/Qwen3-32B", "--gpus", "H100:2").returncode == 0


@pytest.mark.process
def test_a_model_that_nobody_knows_has_prices_and_no_memory(typed: Typed) -> None:
    done = typed("plan", "--model", "some/Model-7B", "--gpus", "H100:4")
    assert done.returncode == 0, done.stderr
    assert "  memory  not known for this model" in done.stdout.splitlines()
    assert done.stdout.startswith("Fit not known: ")
    assert "whether some/Model-7B fits is not known" in done.stderr


@pytest.mark.process
@pytest.mark.parametrize("gpus", ["L4:1", "L40S:1", "H200:1", "RTX4090:1", "H100:3"])
def test_gpus_without_a_price_at_hand_have_their_memory_all_the_same(typed: Typed, gpus: str) -> None:
    done = typed("plan", "--model", "Qwen/Qwen3-1.7B", "--gpus", gpus)
    assert done.returncode == 3
    table = done.stdout.splitlines()
    assert table[0].startswith(
        f"Fits: Qwen/Qwen3-1.7B on {gpus}, prices not known. Change: fetch the prices: "
    )
    assert any(line.startswith("  memory  training takes ") for line in table)
    assert table[-2].startswith(f"  {gpus.partition(':')[0]} has ")
    assert table[-1].startswith("  planned  ") and "none" not in table[-1].lower(), "only what is set"
    message, _, hint = done.stderr.splitlines()[-3:]
    assert message == "Error: there are no prices for aws, lambda on this computer"
    assert hint == f"Hint: launch plan --model Qwen/Qwen3-1.7B --gpus {gpus} --infra aws,lambda --refresh"
    (first, _) = typed("plan", "--model", "Qwen/Qwen3-1.7B", "--gpus", gpus, "--json").stdout.splitlines()
    assert json.loads(first)["rented"]["memory"]["short"] is None


@pytest.mark.process
def test_what_does_not_fit_is_said_before_the_prices_that_are_missing(typed: Typed) -> None:
    done = typed("plan", "--model", "Qwen/Qwen3-8B", "--gpus", "L4:1")
    assert done.returncode == 3 and "DOES NOT FIT" in done.stdout
    assert done.stderr.splitlines()[-3] == "Error: Qwen/Qwen3-8B does not fit L4:1"


@pytest.mark.process
@pytest.mark.parametrize(("gpus", "meant"), [("locl", "local"), ("H1000:1", "H100"), ("H10", "H100")])
def test_a_misspelt_gpu_is_asked_back_where_there_are_no_catalogs(
    typed: Typed, gpus: str, meant: str
) -> None:
    done = typed("plan", "--model", "Qwen/Qwen3-1.7B", "--gpus", gpus)
    name = gpus.partition(":")[0]
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"Error: --gpus {name}:1: launch knows no GPU called {name}",
        f"  did you mean {meant}? (others may be in SkyPilot's catalogs, which are not on this computer)",
        f"Hint: launch plan --model Qwen/Qwen3-1.7B --gpus {meant}:1",
    ]


@pytest.mark.process
def test_where_this_computer_has_no_gpu_it_is_not_the_model_that_is_unknown(
    typed: Typed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("subprocess.Popen", _POPEN)
    done = typed("plan", "--model", "Qwen/Qwen2.5-1.5B-Instruct", "--gpus", "local")
    assert done.returncode == 0, done.stderr
    assert "  memory  not known: no GPU of this computer will do" in done.stdout.splitlines()


@pytest.mark.process
def test_a_name_that_is_nearly_a_known_one_is_asked_back_in_a_plan_too(typed: Typed) -> None:
    done = typed("plan", "--model", "Qwen/Qwen3-1.7", "--gpus", "H100:1")
    assert done.returncode == 0 and "did you mean Qwen/Qwen3-1.7B?" in done.stderr
    for words in (["plan", "--gpus", "H100:1"], []):
        done = typed(*words, "--model", "qwen3-8b")
        assert done.returncode == 3
        assert done.stderr.splitlines()[-3:] == [
            "Error: no model qwen3-8b",
            "  no such folder, and not a hub name (owner/name); did you mean Qwen/Qwen3-8B?",
            f"Hint: {' '.join(['launch', *words, '--model Qwen/Qwen3-8B'])}",
        ]


def test_a_folder_says_its_own_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    found = model_config.find_config(str(tmp_path), {})
    assert found is not None and found.table_date is None and found.config == {"hidden_size": 64}
    memory, remark = memory_fit.plan_memory(settings(tmp_path, str(tmp_path)), ONE, "H100")
    assert memory is None and "does not say how large its layers are" in str(remark)


def test_a_downloaded_model_is_read_before_the_table(tmp_path: Path) -> None:
    snapshot = tmp_path / "hf" / "hub" / "models--Qwen--Qwen3-8B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"hidden_size": 1}))
    found = model_config.find_config(
        "Qwen/Qwen3-8B", {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    )
    assert found is not None and found.config == {"hidden_size": 1} and found.table_date is None
    known = model_config.find_config(
        "qwen/qwen3-8b", {"HF_HOME": str(tmp_path / "none"), "HF_HUB_OFFLINE": "1"}
    )
    assert known is not None and known.config["hidden_size"] == 4096 and known.table_date is not None


# ------------------------------------------------------------------ what is handed on


def test_what_was_planned_is_what_the_run_is_told(tmp_path: Path) -> None:
    rented = fitted(tmp_path, "Qwen/Qwen2.5-7B-Instruct")
    assert rented.memory is not None and rented.memory.fits
    told = build(runtime_overrides(rented), **PLACES)
    assert told.train.activation_checkpointing is True
    assert told.train.pack_tokens == rented.memory.pack_tokens
    assert told.engine.max_model_len == rented.memory.max_model_len
    assert told.engine.max_num_seqs is None
    assert told.engine.memory_fraction == rented.memory.memory_fraction != SHARED_FRACTION
    assert told.engine.kv_cache_gib == rented.memory.kv_cache_gib is not None


def test_whoever_sets_something_has_it_as_it_was_set(tmp_path: Path) -> None:
    sets = ("engine.max_model_len=4096", "train.pack_tokens=6000", "engine.memory_fraction=0.4")
    rented = fitted(tmp_path, "Qwen/Qwen2.5-7B-Instruct", *sets)
    asked = settings(tmp_path, "Qwen/Qwen2.5-7B-Instruct", *sets).runtime
    told = build(runtime_overrides(rented) | asked, **PLACES)
    assert (told.engine.max_model_len, told.train.pack_tokens) == (4096, 6000)
    assert told.engine.memory_fraction == 0.4
    assert rented.memory is not None and rented.memory.pack_tokens == 6000


def test_a_rank_and_its_layers_count_as_they_were_set(tmp_path: Path) -> None:
    small, large = (
        fitted(tmp_path, "Qwen/Qwen3-8B", f"train.lora.rank={rank}", rented=FOUR).memory for rank in (8, 256)
    )
    assert small is not None and large is not None
    sizes = [{line.name: line.size for line in memory.trainer}["AdamW"] for memory in (small, large)]
    assert sizes[1] == 32 * sizes[0]


def test_layers_are_named_on_a_command_line_with_commas(tmp_path: Path) -> None:
    few = fitted(tmp_path, "Qwen/Qwen3-8B", "train.lora.target_modules=q_proj, v_proj", rented=FOUR).memory
    assert few is not None
    assert "rank 16 on q_proj, v_proj" in {line.name: line.why for line in few.trainer}["adapter"]


def test_a_run_that_is_taken_up_is_planned_anew(tmp_path: Path) -> None:
    """What a default was then is no wish of anybody's."""
    kept = resume_source.record_details(settings(tmp_path, "tiny", "train.pack_tokens=9000"), "m")["runtime"]
    assert kept["train.pack_tokens"] == "9000"
    assert not set(MEMORY_SETTINGS) - {"train.pack_tokens"} & set(kept)


# ------------------------------------------------------------------ what is refused


def test_a_run_that_cannot_fit_is_refused_before_a_provider_is_asked(tmp_path: Path) -> None:
    rented = fitted(tmp_path, "Qwen/Qwen3-32B")
    own = settings(tmp_path, "Qwen/Qwen3-32B", "train.seed=7", gpus="H100:1")
    plan = Plan("1×H100 on aws", "Qwen/Qwen3-32B", 3.29, None, 900.0, None, rented)
    with pytest.raises(PreflightError) as refused:
        memory_fit.refuse_too_small(plan, own)
    assert refused.value.exit_code == 3
    assert "launch plan --model Qwen/Qwen3-32B --gpus H100:2 --set train.seed=7" in str(refused.value.hint)
    memory_fit.refuse_too_small(replace(plan, rented=fitted(tmp_path, "Qwen/Qwen3-8B")), own)
    memory_fit.refuse_too_small(replace(plan, rented=ONE), own)
    memory_fit.refuse_too_small(replace(plan, rented=None), own)


def test_a_setting_that_is_in_the_way_is_named(tmp_path: Path) -> None:
    rented = fitted(tmp_path, "Qwen/Qwen3-8B", "train.activation_checkpointing=false", rented=FOUR)
    assert rented.memory is not None and rented.memory.fits, "a shorter context makes room"
    sets = ("train.activation_checkpointing=false", "engine.max_model_len=32768")
    rented = fitted(tmp_path, "Qwen/Qwen3-8B", *sets, rented=FOUR)
    plan = Plan("4×H100 on aws", "Qwen/Qwen3-8B", 16.36, None, 900.0, None, rented)
    with pytest.raises(PreflightError) as refused:
        memory_fit.refuse_too_small(plan, settings(tmp_path, "Qwen/Qwen3-8B", *sets, gpus="H100:4"))
    hint = str(refused.value.hint)
    assert "without train.activation_checkpointing" in hint
    assert "engine.max_model_len=32768" in hint and "activation_checkpointing=false" not in hint
