"""price_agreement.py, pricing.py and `launch plan`: what is shown and agreed to before renting."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.base.errors import PreflightError, UsageError
from launcher.base.home import Home
from launcher.config import price_agreement, pricing
from launcher.config.setting_sources import load
from launcher.console.output import Output
from launcher.records.records import RecordStore
from launcher.types.offers import Market, Offer
from launcher.types.plan import Plan, make_plan
from launcher.types.settings import Settings
from tests.support.typed import Typed

CORES = len(os.sched_getaffinity(0))

CATALOGS = Path(__file__).resolve().parents[1] / "cloud" / "catalogs"
POPEN = subprocess.Popen
QUESTION = "4×H100 on aws/us-east-1, $27.52/h, deadline 4h: at most $122.24. Proceed? [y/N]"


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Typed:
    """`launch` of a user with an AWS account and prices at hand; nothing may be asked of SkyPilot."""
    monkeypatch.setattr("subprocess.Popen", lambda *words, **options: pytest.fail(f"started {words}"))
    (tmp_path / "user" / ".aws").mkdir(parents=True)
    shutil.copytree(CATALOGS, tmp_path / "user" / ".sky" / "catalogs")
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    return Typed(tmp_path / "project", tmp_path / "home")


@pytest.fixture(autouse=True)
def no_account_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def offered(tmp_path: Path) -> tuple[Settings, Plan]:
    settings = load({"gpus": "H100:4"}, environ={}, folder=tmp_path, home=Home(*[tmp_path / "none"] * 3))
    offer = Offer("aws", "aws/us-east-1", "p5.24xlarge", "H100", 4, 27.52)
    return settings, make_plan(settings, Market((offer,), {"H100": [4]}))


def test_g11_without_a_terminal_and_without_yes_nothing_is_asked_of_anyone(
    typed: Typed, tmp_path: Path
) -> None:
    done = typed("--gpus", "H100:4", "--infra", "aws", "--", "true")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "Error: there is no terminal to ask you about the price",
        "  renting GPUs costs money",
        "Hint: launch plan --gpus H100:4 --infra aws -- true  # what it costs; then the same run with --yes",
    ]
    assert not (tmp_path / "home").exists()


@pytest.mark.slow
def test_g11_above_the_price_cap_the_run_is_refused(
    typed: Typed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("subprocess.Popen", POPEN)
    words = ["--gpus", "H100:4", "--infra", "aws", "--max-price", "20", "--yes", "--", "true"]
    home = str(tmp_path / "user")
    done = typed(*words, HOME=home)
    assert done.returncode == 4, done.stderr
    assert "no offer is that cheap" in done.stderr and "$27.52/h or more" in done.stderr
    assert not (tmp_path / "home" / "runs").exists()
    # With prices that are low enough, an account is what is missing next.
    shutil.rmtree(tmp_path / "user" / ".aws")
    words[5] = "28"
    done = typed(*words, HOME=home)
    assert done.returncode == 3
    assert "there are no credentials for aws" in done.stderr


@pytest.mark.parametrize(("answer", "agreed"), [("y\n", True), ("YES\n", True), ("\n", False), ("", False)])
def test_g11_the_price_and_the_most_it_can_cost_are_agreed_to(
    offered: tuple[Settings, Plan], monkeypatch: pytest.MonkeyPatch, answer: str, agreed: bool
) -> None:
    settings, plan = offered
    monkeypatch.setattr("launcher.console.consent.can_prompt", lambda output: True)
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    stderr = io.StringIO()
    output = Output(stdout=io.StringIO(), stderr=stderr, environ={})
    if agreed:
        price_agreement.confirm(output, plan, settings)
    else:
        with pytest.raises(UsageError, match="not agreed to"):
            price_agreement.confirm(output, plan, settings)
    *shown, question = stderr.getvalue().splitlines()
    assert question == QUESTION
    assert any("3 for inference, 1 for training" in line for line in shown)
    assert any(line.split() == ["aws/us-east-1", "p5.24xlarge", "$27.52/h"] for line in shown)


def test_g11_yes_agrees_and_json_cannot_be_asked(offered: tuple[Settings, Plan]) -> None:
    settings, plan = offered
    output = Output(as_json=True, stdout=io.StringIO(), stderr=io.StringIO(), environ={})
    price_agreement.confirm(output, plan, replace(settings, yes=True))
    with pytest.raises(UsageError, match="there is no terminal"):
        price_agreement.confirm(output, plan, settings)
    price_agreement.confirm(output, make_plan(replace(settings, gpus=None)), settings)


def test_an_account_is_asked_for_where_it_runs(offered: tuple[Settings, Plan], tmp_path: Path) -> None:
    _, plan = offered
    with pytest.raises(PreflightError, match="no credentials for aws"):
        pricing.refuse_without_account(plan, tmp_path)
    (tmp_path / ".aws").mkdir()
    pricing.refuse_without_account(plan, tmp_path)


@pytest.mark.parametrize(
    "words", [["plan"], ["--dry-run"], ["--dry-run", "--", "true"], ["plan", "--", "true"]]
)
def test_n17_the_plan_of_a_run_here_is_shown_and_nothing_is_started(
    typed: Typed, words: list[str], tmp_path: Path
) -> None:
    done = typed("--max", "2h", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "Fits: tiny on this computer, $0.00/h, deadline 2h; nothing is rented. Nothing to change.",
        f"  a step  about 2 s for 64 answers of 12 tokens to prompts of 140, estimated for {CORES} cores; "
        "programs differ",
    ]
    assert not (tmp_path / "home").exists()


def test_the_plan_takes_the_options_of_a_run_before_and_behind_it(typed: Typed) -> None:
    done = typed("--max", "2h", "--lease", "1m", "plan", "--json", "--lease", "5m", "--model", "some/model")
    plan = json.loads(done.stdout)
    assert (plan["deadline_seconds"], plan["lease_seconds"]) == (7200, 300)
    assert plan["model"] == "some/model"
    assert plan["rented"] is None and plan["cost_at_most"] == 0


def test_n17_a_local_plan_has_a_steps_seconds_of_the_last_run_of_the_model_here(
    typed: Typed, tmp_path: Path
) -> None:
    store = RecordStore(Home.find({"LAUNCH_HOME": str(tmp_path / "home")}))
    for name, model, steps in (("mine", "tiny", 5), ("other", "some/model", 5), ("short", "tiny", 2)):
        plan = {"model": model, "where": "this computer"}
        results = store.folder(store.create(name=name, details={"plan": plan}).id) / "results"
        results.mkdir()
        lines = [{"step": step, "kind": "train", "time": 100.0 + 7 * step} for step in range(1, steps + 1)]
        (results / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = typed("plan").stdout.splitlines()[1]
    assert shown == "  a step  7 s in mine, the last run of tiny here; programs differ"
    assert json.loads(typed("plan", "--json").stdout)["seconds_per_step"] == 7.0
    assert json.loads(typed("plan", "--json", "--model", "a/b").stdout)["seconds_per_step"] is None


def test_a_step_is_estimated_from_the_size_of_the_model_and_the_cores(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(model: str, cores: int) -> float:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        return json.loads(typed("plan", "--json", "--model", model).stdout)["seconds_per_step"]

    small = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert seconds(small, 2) == pytest.approx(18.5, abs=1), "as measured"
    assert seconds(small, 8) < seconds(small, 2) / 2
    assert seconds("tiny", 2) < 2 < seconds("Qwen/Qwen2.5-0.5B-Instruct", 2)


@pytest.mark.slow
def test_n17_the_plan_of_a_rented_run_says_where_and_what_it_costs(
    typed: Typed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("subprocess.Popen", POPEN)
    done = typed("--gpus", "H100:4", "plan", "--infra", "aws/us-east-1", HOME=str(tmp_path / "user"))
    assert done.returncode == 0, done.stderr
    first, *table = done.stdout.splitlines()
    asked = QUESTION.removesuffix(". Proceed? [y/N]")
    assert first == f"Fits: {asked}. Change: name the model with --model; without it tiny is trained"
    heads = [line.split()[0] for line in table]
    assert heads[:7] == ["model", "GPUs", "memory", "limits", "disk", "IN", "aws/us-east-1"]
    assert heads[7] == "MEMORY" and heads[-1] == "planned"
    assert done.stderr.splitlines() == [
        "no --model: the rented GPUs would train tiny, the built-in model of 0.9 million parameters",
        "Hint: --model Qwen/Qwen2.5-7B-Instruct  # or --model tiny, if that is meant",
    ]
    run = typed(
        "--gpus", "H100:4", "--dry-run", "--model", "tiny", "--infra", "aws", HOME=str(tmp_path / "user")
    )
    assert run.returncode == 0 and "no --model" not in run.stderr, "a model that is named is meant"
