"""What goes wrong between trainer and engine, and how the publication says so: the old version stays served.

A real gateway in front of a real engine. The trainer is played (its checkpoints are ours to spoil), and the
engine's door can be tampered with (what reaches it, and what it answers, is ours to change).
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.runtime.adapters import change, write_adapter
from tests.runtime.conftest import RunningEngine, forget
from tests.runtime.gateway_process import Gateway
from tests.runtime.played_trainer import PlayedTrainer
from tests.runtime.tampered_engine import CHAT, LOAD, SCORE, VERIFY, Fault, TamperedEngine

pytestmark = pytest.mark.slow

# Step after step is committed and not served: rollouts fall behind without any of them being stale here.
PATIENT = {"max_staleness": 60, "engine": {"max_loras": 62}}

Edit = Callable[[dict[str, Any], dict[str, Any]], Any]
MLP = "base_model.model.model.layers.0.mlp"


# ------------------------------------------------------------------ what is done to an adapter


def another_alpha(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["lora_alpha"] *= 2


def another_rank_in_words(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["r"] //= 2


def gate_and_up_swapped(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    for side in "AB":
        gate, up = f"{MLP}.gate_proj.lora_{side}.weight", f"{MLP}.up_proj.lora_{side}.weight"
        tensors[gate], tensors[up] = tensors[up], tensors[gate]


def one_missing(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    for side in "AB":
        del tensors[f"{MLP}.down_proj.lora_{side}.weight"]


def half_missing(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    del tensors[f"{MLP}.down_proj.lora_A.weight"]


def one_too_many(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    name = "base_model.model.model.layers.9.mlp.down_proj"
    for side in "AB":
        tensors[f"{name}.lora_{side}.weight"] = tensors[f"{MLP}.down_proj.lora_{side}.weight"].clone()


def one_not_a_number(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    tensors[f"{MLP}.up_proj.lora_B.weight"][3, 2] = float("nan")


# ------------------------------------------------------------------ what is done on the way


@dataclass
class World:
    """A gateway that serves a good version 1, its trainer and its engine."""

    gateway: Gateway
    trainer: PlayedTrainer
    engine: TamperedEngine
    model: Path
    folder: Path
    seeds: Iterator[int] = field(default_factory=lambda: iter(range(1, 1000)))

    def adapter(self, **more: Any) -> Path:
        """An adapter no version had before."""
        seed = next(self.seeds)
        return write_adapter(self.folder / f"adapter-{seed}", self.model, seed=seed, **more)

    def served(self, model: str | None = None) -> tuple[int, list[float]]:
        """The version that answers (under the policy's name), and what it thinks of its answer."""
        answer = self.gateway.chat(model=model or self.gateway.name, temperature=0, logprobs=True)
        tokens = answer.json()["choices"][0]["logprobs"]["content"]
        return int(answer.headers["x-slipway-policy-version"]), [token["logprob"] for token in tokens]

    def versions(self) -> set[str]:
        """What the engine has loaded of this gateway's versions."""
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self.engine.socket)), base_url="http://x"
        ) as it:
            names = {model["id"] for model in it.get("/v1/models").json()["data"]}
        return {name for name in names if name.startswith(f"{self.gateway.name}@v")}

    def loads(self, edit: Edit) -> Fault:
        """The engine loads something else than what was committed."""
        return Fault(rewrite={LOAD: lambda body: self._other(body, edit)})

    def _other(self, body: dict[str, Any], edit: Edit) -> dict[str, Any]:
        place = self.folder / f"loaded-{body['lora_name']}"
        return body | {"lora_path": str(change(Path(body["lora_path"]), place, edit))}

    def stale(self) -> Fault:
        """Where its prefix cache is read, the engine goes by the version before: as one whose cache does not
        tell them apart would."""
        before = f"{self.gateway.name}@v1"
        return Fault(
            rewrite={SCORE: lambda body: body | {"model": before} if "logprob_token_ids" in body else body}
        )


@dataclass(frozen=True)
class Case:
    """One fault, and the words it is reported with."""

    says: str
    # Done to what the trainer exports; its own word (the probe) is that of the right adapter.
    export: Edit | None = None
    # The adapter it trains.
    trains: dict[str, Any] = field(default_factory=dict)
    # Done to the whole committed folder.
    disk: Callable[[Path], None] | None = None
    # What lies between gateway and engine.
    engine: Callable[[World], Fault] = lambda world: Fault()
    version: int | None = None
    # Added to the trainer's word.
    word: float = 0.0


def truncated(folder: Path) -> None:
    path = folder / "adapter" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


CASES = {
    # The trainer's export is wrong: the file is what it committed, but not what it trained.
    "the export has twice the alpha": Case("served and trained logprobs differ", another_alpha),
    "the export names half the rank": Case("served and trained logprobs differ", another_rank_in_words),
    "the export swaps gate and up": Case("served and trained logprobs differ", gate_and_up_swapped),
    "the export lacks a module": Case("served and trained logprobs differ", one_missing),
    "the export lacks half a module": Case("/v1/load_lora_adapter", half_missing),
    "the export has a module too many": Case("the engine has no such module|unexpected", one_too_many),
    "the export has a NaN": Case("not finite", one_not_a_number),
    "the export is of a rank without a place": Case("rank 32", trains={"rank": 32}),
    "the trainer's own word is NaN": Case("own logprobs are not finite", word=float("nan")),
    "new weights under a used version": Case("a name is never used again", version=1),
    # The disk: not what was committed.
    "the file is truncated after the commit": Case("does not match the manifest", disk=truncated),
    # The engine has something else than the file.
    "the engine scales by another alpha": Case(
        "28 tensors differ from the file", engine=lambda world: world.loads(another_alpha)
    ),
    "the engine swaps gate and up": Case(
        "4 tensors differ from the file: .*gate_proj", engine=lambda world: world.loads(gate_and_up_swapped)
    ),
    "the engine lacks a module": Case(
        "holds 27 of 28 modules", engine=lambda world: world.loads(one_missing)
    ),
    "the engine says loaded, and is not": Case(
        "is not loaded", engine=lambda world: Fault(rewrite={LOAD: lambda body: None})
    ),
    "the engine refuses": Case(
        "out of slots", engine=lambda world: Fault(refuse={LOAD: (500, "out of slots")})
    ),
    "the engine cannot compare": Case(
        "no such method", engine=lambda world: Fault(refuse={VERIFY: (501, "no such method")})
    ),
    "the engine cannot score": Case(
        "no logprobs", engine=lambda world: Fault(refuse={SCORE: (400, "no logprobs")})
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def world(engine: RunningEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("faults")
    door = TamperedEngine(engine.socket)
    state = folder / "state"
    state.mkdir()
    gateway = Gateway(
        state, door.socket, engine.model, served_name=f"faulty-{uuid.uuid4().hex[:8]}", **PATIENT
    ).until_ready()
    made = World(
        gateway, PlayedTrainer(gateway, engine.model, folder / "commits"), door, engine.model, folder
    )
    status = made.trainer.step(made.adapter())
    assert status["state"] == "published", status
    yield made
    gateway.stop()
    door.close()
    forget(engine, gateway.name)
    shutil.rmtree(folder)


def caught(world: World, case: Case) -> None:
    """The publication fails with the case's words, and the old version stays served."""
    before, loaded = world.served(), world.versions()
    right = world.adapter(**case.trains)
    exported = (
        right if case.export is None else change(right, world.folder / f"{right.name}-out", case.export)
    )
    world.engine.fault = case.engine(world)
    status = world.trainer.step(
        exported, policy_adapter=right, version=case.version, afterwards=case.disk, offset=case.word
    )
    world.engine.fault = Fault()
    assert status["state"] == "failed" and re.search(case.says, status["error"]), status["error"]
    assert world.served() == before
    assert world.versions() == loaded, "something stayed staged"
    said = world.gateway.status()
    assert said["version"] == before[0] and said["step"] == before[0]
    if status["version"] is not None:  # committed: the run goes on with a policy that is not served
        assert said["phase"] == "degraded" and re.search(case.says, said["detail"]), said["detail"]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_fault_is_caught_at_the_publication_and_the_old_version_stays(world: World, case: Case) -> None:
    caught(world, case)


def test_c33_a_prefix_cache_that_tells_no_versions_apart_is_caught_at_the_publication(world: World) -> None:
    caught(world, Case("when the prefix cache is read", engine=World.stale))


def test_after_a_fault_the_next_good_version_is_served(world: World) -> None:
    world.engine.fault = Fault(refuse={LOAD: (500, "out of slots")})
    assert world.trainer.step(world.adapter())["state"] == "failed"
    world.engine.fault = Fault()
    status = world.trainer.step(world.adapter())
    assert status["state"] == "published", status
    assert world.served()[0] == status["version"]
    assert (world.gateway.status()["phase"], world.gateway.status()["detail"]) == ("ready", None)


@pytest.mark.parametrize("path", [LOAD, VERIFY, SCORE])
def test_an_engine_that_dies_in_the_middle_is_waited_for_and_asked_again(world: World, path: str) -> None:
    world.engine.fault = Fault(die=frozenset({path}), away=3)
    status = world.trainer.step(world.adapter())
    assert status["state"] == "published", status
    lines = (world.gateway.folder / "publications.jsonl").read_text().splitlines()
    assert [json.loads(line)["outcome"] for line in lines[-2:]] == ["failed", "published"]
    assert world.served()[0] == status["version"]


def test_c37_an_engine_that_comes_back_empty_is_given_every_served_version_again(
    world: World, engine: RunningEngine
) -> None:
    """As after its restart: nothing is loaded. (vLLM's sleep is off, on CPU and elsewhere.)"""
    newest = world.trainer.step(world.adapter())["version"]
    names = [world.gateway.name, f"{world.gateway.name}@v{newest}", f"{world.gateway.name}@v1", "base"]
    before = [world.served(name) for name in names]
    assert [version for version, _ in before] == [newest, newest, 1, 0]
    world.engine.fault = Fault(die=frozenset({SCORE, CHAT}), away=2)
    forget(engine, world.gateway.name)
    assert [world.served(name) for name in names] == before


def test_c55_a_version_that_was_unloaded_answers_as_it_did_when_it_was_new(
    engine: RunningEngine, served_name: str, tmp_path: Path
) -> None:
    door = TamperedEngine(engine.socket)
    state = tmp_path / "state"
    state.mkdir()
    gateway = Gateway(state, door.socket, engine.model, served_name=served_name)
    try:
        made = World(
            gateway.until_ready(),
            PlayedTrainer(gateway, engine.model, tmp_path),
            door,
            engine.model,
            tmp_path,
        )
        first = f"{served_name}@v1"
        assert made.trainer.step(made.adapter())["state"] == "published"
        before = made.served(first)
        for _ in range(4):
            assert made.trainer.step(made.adapter())["state"] == "published"
        assert first not in made.versions() and made.served()[0] == 5
        assert made.served(first) == before
        assert first in made.versions()
        assert made.trainer.step(made.adapter())["state"] == "published"
        assert first in made.versions(), "it stays while its place is not needed"
    finally:
        gateway.stop()
        door.close()
        forget(engine, served_name)


def test_c34_one_of_two_engines_that_refuses_keeps_the_old_version_on_both(
    engine: RunningEngine, served_name: str, tmp_path: Path
) -> None:
    doors = [TamperedEngine(engine.socket) for _ in range(2)]
    state = tmp_path / "state"
    state.mkdir()
    gateway = Gateway(state, doors[0].socket, engine.model, served_name=served_name, engines=2, **PATIENT)
    gateway.point_to(doors[1].socket, 1)
    try:
        gateway.until_ready()
        made = World(
            gateway, PlayedTrainer(gateway, engine.model, tmp_path), doors[0], engine.model, tmp_path
        )
        assert made.trainer.step(made.adapter())["state"] == "published"
        before = made.served()
        for path in (LOAD, VERIFY, SCORE):
            doors[1].fault = Fault(refuse={path: (500, "not me")})
            status = made.trainer.step(made.adapter())
            assert status["state"] == "failed" and "engine-1: " in status["error"], status["error"]
            assert (made.served(), made.versions()) == (before, {f"{served_name}@v1"})
        doors[1].fault = Fault()
        assert made.trainer.step(made.adapter())["state"] == "published"
    finally:
        gateway.stop()
        for door in doors:
            door.close()
        forget(engine, served_name)
