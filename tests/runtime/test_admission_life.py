"""The life of an admission in the gateway: nothing is ready before it, a refusal is said, it is asked once.

The engine is played and says what the trial's own probe says, more or less; the numbers' judgement is tested
on numbers. What a real engine and trainer make of one another is in test_admission.py.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.gateway.engines.engine_client import AdapterReport
from runtime.gateway.engines.parity_check import ParityError, judge
from runtime.gateway.engines.probe_comparison import LogprobProbe, Scores
from runtime.gateway.engines.version_check import Measured
from runtime.shared import failpoints, parity_check
from runtime.shared.runtime_config import RuntimeConfig
from runtime.shared.start_adapter_layout import START
from runtime.trainer.parity_export import export_parity_check
from tests.runtime.failpoints import arm
from tests.runtime.gateway_process import Gateway
from tests.runtime.pretend_engine import PretendEngine
from tests.runtime.trainer_fixtures import fresh_policy, tiny_model
from tests.support.waiting import wait_until

# ------------------------------------------------------------------ the judgement

TRAINED = np.random.default_rng(0).normal(-3.0, 2.0, 48)
EFFECT = np.random.default_rng(1).normal(0.0, 0.8, 48)


def measured(
    base: Any = 0.0, adapter: Any = 0.0, *, sharp: float = 1.0, effect: Any = EFFECT, cached: float = 0.0
) -> Measured:
    """What an engine says that is so far off the trainer's word; `sharp`: how much logprobs vary."""
    trained, moved = TRAINED * sharp, (TRAINED + effect) * sharp
    probe = LogprobProbe([[1, 2]], np.array([False, True]), moved, trained)
    scores = Scores(moved + adapter, trained + base, np.array([cached]))
    return Measured(["engine-0"], AdapterReport(14, 14, (), "s"), probe, [scores], (0.1, 0.1, 0.1))


NOISE = np.random.default_rng(2).normal(0.0, 0.04, 48)


def test_what_differs_by_rounding_alone_is_admitted() -> None:
    assert judge(measured(NOISE * 1e-3, NOISE[::-1] * 1e-3), "float32").base.largest < 1e-3
    proof = judge(measured(NOISE, NOISE[::-1]), "bfloat16")
    assert proof.effect_error < 0.1 and proof.base.share < 0.03


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("side", ["base", "adapter"])
def test_c58_a_model_that_differs_under_the_base_or_under_the_adapter_is_refused(
    dtype: str, side: str
) -> None:
    with pytest.raises(ParityError, match=r"(by up to|by) .* under a random adapter .* under the base"):
        judge(measured(*(EFFECT * 2 * (side == name) for name in ("base", "adapter"))), dtype)


def test_c58_a_model_with_flat_logprobs_is_compared_by_how_much_they_vary() -> None:
    """Off by less than bf16 may be, on every token, and still another model."""
    other = TRAINED[::-1] * 0.02 - TRAINED * 0.02
    assert np.abs(other).mean() < 0.1
    with pytest.raises(ParityError, match="of their spread"):
        judge(measured(other, other, sharp=0.02), "bfloat16")
    judge(measured(NOISE * 0.02, NOISE * 0.02, sharp=0.02), "bfloat16")


def test_c58_an_engine_that_leaves_the_adapter_out_is_refused_however_little_it_does() -> None:
    small = EFFECT * 0.2
    with pytest.raises(ParityError, match="what a random adapter does to logprobs differs"):
        judge(measured(adapter=-small / 2, effect=small, sharp=0.5), "bfloat16")


def test_c58_an_adapter_that_does_nothing_proves_nothing() -> None:
    with pytest.raises(ParityError, match="changes no logprob"):
        judge(measured(effect=EFFECT * 0), "float32")


def test_what_is_no_number_agrees_with_nothing() -> None:
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(ParityError):
            judge(measured(base=np.nan), dtype)


def test_a_prefix_cache_that_tells_names_apart_wrongly_is_refused() -> None:
    with pytest.raises(ParityError, match="prefix cache"):
        judge(measured(cached=0.9), "float32")


# ------------------------------------------------------------------ the gateway

LIFE = pytest.mark.slow


class World:
    """A run's folder with a gateway and a played engine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sockets = Path(tempfile.mkdtemp(prefix="slip-"))
        self.engine = PretendEngine(self.sockets / "e.sock")
        self.gateway: Gateway | None = None

    def begin(self) -> Gateway:
        self.gateway = Gateway(self.folder, self.engine.socket, tiny_model(), admitted=False)
        return self.gateway

    def leave_trial(self) -> None:
        """As the trainer does, before its first step."""
        assert self.gateway is not None
        subject = parity_check.fingerprint(RuntimeConfig.model_validate(self.gateway.config))
        export_parity_check(fresh_policy(), self.folder, subject, tiny_model(), "tiny")

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.folder / parity_check.RECORD).read_text())

    @property
    def loaded(self) -> list[str]:
        """What the engine was asked to load for an admission."""
        return [name for name in self.engine.loading if name.startswith("admission-")]

    def outcomes(self) -> list[str]:
        lines = (self.folder / "publications.jsonl").read_text().splitlines()
        return [json.loads(line)["outcome"] for line in lines]

    def close(self) -> None:
        if self.gateway is not None:
            self.gateway.kill()
        self.engine.close()
        shutil.rmtree(self.sockets)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    yield found
    found.close()


def until_engine_is_up(gateway: Gateway, life: int = 1) -> None:
    """In this life of the gateway, counted from 1."""
    log = gateway.folder / "gateway.log"
    wait_until(lambda: log.read_text().count("engine-0: ready") == life, what="the engine")


@LIFE
def test_c58_nothing_is_ready_before_the_model_is_admitted_and_then_once_for_all(world: World) -> None:
    gateway = world.begin()
    until_engine_is_up(gateway)
    assert (gateway.status()["phase"], gateway.status()["admission"]) == ("starting", None)
    world.leave_trial()
    status = gateway.until_ready().status()
    assert status["admission"] == world.record
    assert world.record["admitted"] and world.record["adapter"]["largest"] < 1e-6 < world.record["effect"]
    assert world.outcomes() == ["admitted"] and len(world.loaded) == 1 and not world.engine.adapters
    wait_until(lambda: not (world.folder / parity_check.FOLDER).exists(), what="the trial is removed")
    gateway.kill()
    gateway.start()
    gateway.until_ready()
    assert world.outcomes() == ["admitted"] and len(world.loaded) == 1, "it is not asked again"
    gateway.kill()
    gateway._settings["dtype"] = "bfloat16"
    gateway.start()
    until_engine_is_up(gateway, life=3)
    assert gateway.status()["phase"] == "starting", "of what is computed otherwise it was never asked"


@LIFE
def test_c58_a_model_that_is_refused_is_never_ready_and_the_status_says_why(world: World) -> None:
    gateway = world.begin()
    world.engine.off = 0.5
    world.leave_trial()
    wait_until((world.folder / parity_check.RECORD).exists, what=gateway._said)
    status = gateway.status()
    assert status["phase"] == "failed"
    assert "differ by up to 0.5 under a random adapter (at most 0.001)" in status["detail"]
    assert status["admission"] == world.record
    assert not world.record["admitted"] and world.record["reason"] in status["detail"]
    assert world.record["base"]["largest"] < 1e-6, "the base was right"
    assert world.outcomes() == ["refused"] and not world.engine.adapters


@LIFE
def test_an_engine_that_cannot_load_it_is_quoted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.engine.refuses = "PhiMoEForCausalLM does not support LoRA yet."
    gateway = world.begin()
    world.leave_trial()
    wait_until((world.folder / parity_check.RECORD).exists, what=gateway._said)
    assert gateway.status()["phase"] == "failed"
    assert "PhiMoEForCausalLM does not support LoRA yet." in gateway.status()["detail"]
    assert world.outcomes() == ["refused"]


@LIFE
def test_killed_in_the_middle_it_is_asked_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    armed = world.folder / "armed"
    monkeypatch.setenv(failpoints.VARIABLE, arm(armed, "admission.proven:kill9"))
    gateway = world.begin()
    world.leave_trial()
    gateway.process.wait(60)
    assert not armed.exists() and not (world.folder / parity_check.RECORD).exists()
    gateway.http.close()
    gateway.start()
    gateway.until_ready()
    assert world.record["admitted"] and len(world.loaded) == 2


@LIFE
def test_c58_a_run_that_begins_with_an_adapter_is_admitted_first(world: World) -> None:
    policy = fresh_policy()
    policy.export_adapter(world.folder / START, "tiny")
    gateway = world.begin()
    commit_start(world.folder)
    until_engine_is_up(gateway)
    wait_until(lambda: gateway.http.get("/slipway/steps").json()[0]["state"] not in ("queued", "training"))
    assert (gateway.status()["phase"], gateway.status()["version"]) == ("starting", 0)
    assert world.engine.loading == []
    world.leave_trial()
    assert gateway.until_ready().status()["version"] == 1
    assert world.outcomes() == ["admitted", "published"]


def commit_start(folder: Path) -> None:
    """What the trainer makes of the adapter that the run begins with, played."""
    from tests.runtime.test_recall import committed

    wait_until((folder / "steps" / "000001").exists, what="the first step is given")
    committed(folder / "checkpoints", 1)
