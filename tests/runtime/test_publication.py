"""Publishing adapters to a real engine: proof, refusals, names, retirement (version_check.py)."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.gateway.engines.engine_client import EngineClient, EngineError
from runtime.gateway.engines.version_check import AdapterVerifier, VerificationError
from runtime.shared.checkpoint import Checkpoint
from tests.runtime.adapters import change, commit, write_adapter
from tests.runtime.conftest import RunningEngine
from tests.runtime.tampered_engine import LOAD, SCORE, VERIFY, Fault, TamperedEngine

pytestmark = pytest.mark.slow

PROMPT = 40
SEQUENCE = random.Random(5).choices(range(3, 800), k=PROMPT + 20)


@pytest.fixture
def committed(engine: RunningEngine, tmp_path: Path) -> Callable[..., Checkpoint]:
    """Commits a checkpoint with a random adapter, as the trainer would."""

    def make(version: int, seed: int | None = None, **more: Any) -> Checkpoint:
        seed = version if seed is None else seed
        adapter = write_adapter(tmp_path / f"adapter-{seed}", engine.model, seed=seed)
        root = tmp_path / f"checkpoints-{seed}"
        return commit(root, engine.model, adapter, version=version, sequence=SEQUENCE, prompt=PROMPT, **more)

    return make


@pytest.fixture
def with_client(engine: RunningEngine) -> Iterator[Callable[[Callable[[EngineClient], Awaitable[Any]]], Any]]:
    """Runs a scenario with a client of the engine."""

    def run(scenario: Callable[[EngineClient], Awaitable[Any]]) -> Any:
        async def body() -> Any:
            client = EngineClient(engine.socket)
            try:
                return await asyncio.wait_for(scenario(client), 120)
            finally:
                await client.close()

        return asyncio.run(body())

    return run


async def sample(client: EngineClient, model: str) -> int:
    """Status of one short completion."""
    body = json.dumps({"model": model, "prompt": SEQUENCE[:8], "max_tokens": 2}).encode()
    async with client.post("/v1/completions", body) as response:
        await response.read()
        return response.status


def test_a_publication_is_proven(with_client, committed, served_name: str) -> None:
    checkpoint = committed(1)

    async def scenario(client: EngineClient) -> None:
        proof = await AdapterVerifier([client], served_name).verify(checkpoint)
        assert proof.name == f"{served_name}@v1"
        assert proof.modules == 28
        assert proof.sha256 == checkpoint.adapter_sha256
        assert proof.probe_tokens == 20
        assert proof.max_error < 2e-4
        assert proof.effect > 0.1
        assert proof.effect_share == pytest.approx(1, abs=1e-3)
        assert await sample(client, proof.name) == 200

    with_client(scenario)


def test_c23_engine_the_file_must_be_the_one_the_trainer_committed(
    with_client, committed, served_name: str, tmp_path: Path
) -> None:
    checkpoint = committed(1)
    path = checkpoint.adapter / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    async def scenario(client: EngineClient) -> None:
        with pytest.raises(VerificationError, match="not the one the trainer committed"):
            await AdapterVerifier([client], served_name).verify(checkpoint)
        assert f"{served_name}@v1" not in await client.adapters()

    with_client(scenario)


def test_c23_engine_what_the_engine_holds_is_compared_with_the_file(
    with_client, committed, served_name: str, tmp_path: Path
) -> None:
    loaded = committed(1).adapter

    def swap(tensors: dict[str, Any], _: dict[str, Any]) -> None:
        gate, up = (
            f"base_model.model.model.layers.0.mlp.{part}_proj.lora_B.weight" for part in ("gate", "up")
        )
        tensors[gate], tensors[up] = tensors[up], tensors[gate]

    others = {
        "swapped": (swap, 2, 28),
        "missing": (
            lambda tensors, _: [tensors.pop(name) for name in list(tensors) if "3.mlp.down" in name],
            1,
            27,
        ),
        "alpha": (lambda _, config: config.update(lora_alpha=32), 28, 28),
    }

    async def scenario(client: EngineClient) -> None:
        name = f"{served_name}@v1"
        await client.load_adapter(name, loaded)
        assert (await client.verify_adapter(name, loaded)).exact
        for label, (edit, differing, expected) in others.items():
            report = await client.verify_adapter(name, change(loaded, tmp_path / label, edit))
            assert not report.exact
            assert (len(report.mismatched), report.expected, report.modules) == (differing, expected, 28), (
                label
            )

    with_client(scenario)


@pytest.mark.parametrize(
    ("trainer_says", "reason"),
    [
        ({"offset": 0.003}, "served and trained logprobs differ"),
        ({"policy_adapter": "other"}, "served and trained logprobs differ"),
    ],
    ids=["logprobs off by 0.003", "another adapter"],
)
def test_a_policy_that_scores_otherwise_than_the_trainers_is_not_served(
    with_client,
    committed,
    engine,
    served_name: str,
    tmp_path: Path,
    trainer_says: dict[str, Any],
    reason: str,
) -> None:
    if trainer_says.get("policy_adapter"):
        trainer_says = {"policy_adapter": write_adapter(tmp_path / "other", engine.model, seed=99)}
    checkpoint = committed(1, **trainer_says)

    async def scenario(client: EngineClient) -> None:
        with pytest.raises(VerificationError, match=reason):
            await AdapterVerifier([client], served_name).verify(checkpoint)
        assert f"{served_name}@v1" not in await client.adapters()

    with_client(scenario)


def test_c10_a_version_whose_logprobs_are_no_numbers_is_not_served(
    with_client, committed, engine, served_name: str, tmp_path: Path
) -> None:
    """Its weights overflow where the engine multiplies with them: what it says of a token is null."""
    endless = write_adapter(tmp_path / "endless", engine.model, seed=4, size=1e30)
    other = write_adapter(tmp_path / "other", engine.model, seed=5)
    common = {"version": 1, "sequence": SEQUENCE, "prompt": PROMPT}
    checkpoint = commit(tmp_path / "a", engine.model, endless, **common, policy_adapter=other)

    async def scenario(client: EngineClient) -> None:
        with pytest.raises(VerificationError, match="not a number"):
            await AdapterVerifier([client], served_name).verify(checkpoint)
        assert f"{served_name}@v1" not in await client.adapters()
        await AdapterVerifier([client], served_name).verify(committed(2))

    with_client(scenario)


def test_an_adapter_smaller_than_the_tolerance_must_still_show_its_effect(
    with_client, committed, engine, served_name: str, tmp_path: Path
) -> None:
    """First steps move logprobs by less than 1e-3: an engine that ignored them would pass on error alone."""
    tiny = write_adapter(tmp_path / "tiny", engine.model, seed=3, size=2e-5)
    none = write_adapter(tmp_path / "none", engine.model, seed=3, size=0.0)
    common = {"version": 1, "sequence": SEQUENCE, "prompt": PROMPT}
    served = commit(tmp_path / "a", engine.model, tiny, **common)
    ignored = commit(tmp_path / "b", engine.model, none, **common, policy_adapter=tiny)

    async def scenario(client: EngineClient) -> None:
        proof = await AdapterVerifier([client], served_name).verify(served)
        assert 0 < proof.effect < 1e-3
        assert proof.effect_share == pytest.approx(1, abs=0.2)
        with pytest.raises(VerificationError, match="of what the adapter does"):
            await AdapterVerifier([client], f"{served_name}-x").verify(ignored)

    with_client(scenario)


def test_c33_a_name_is_never_used_for_other_weights(with_client, committed, served_name: str) -> None:
    first, second = committed(1, seed=1), committed(1, seed=2)

    async def scenario(client: EngineClient) -> None:
        verifier = AdapterVerifier([client], served_name)
        await verifier.verify(first)
        with pytest.raises(VerificationError, match="never used again"):
            await verifier.verify(second)
        # Another gateway process remembers nothing: the engine's own adapter decides.
        with pytest.raises(VerificationError, match="differ from the file"):
            await AdapterVerifier([client], served_name).verify(second)
        assert await sample(client, f"{served_name}@v1") == 200

    with_client(scenario)


def test_c33_an_engine_takes_no_other_weights_under_a_name_it_has_served(
    with_client, engine, served_name: str, tmp_path: Path
) -> None:
    """Its prefix cache knows them by name and place: answers would come from the old weights' keys."""
    place = write_adapter(tmp_path / "place", engine.model, seed=1)

    async def scenario(client: EngineClient) -> None:
        name = f"{served_name}@v1"
        await client.load_adapter(name, place)
        await client.unload_adapter(name)
        await client.load_adapter(name, place)
        await client.unload_adapter(name)
        write_adapter(place, engine.model, seed=2)
        with pytest.raises(EngineError, match="never used again"):
            await client.load_adapter(name, place)
        assert await client.health()
        assert await sample(client, name) == 404

    with_client(scenario)


def test_c34_when_one_engine_does_not_answer_nothing_stays_staged_on_the_others(
    with_client, committed, served_name: str, tmp_path: Path
) -> None:
    async def scenario(client: EngineClient) -> None:
        dead = EngineClient(tmp_path / "engine-1.sock")
        with pytest.raises(VerificationError, match="engine-1"):
            await AdapterVerifier([client, dead], served_name).verify(committed(1))
        assert f"{served_name}@v1" not in await client.adapters()
        await dead.close()

    with_client(scenario)


def test_g23_an_engine_that_never_answers_a_probe_ends_the_publication_in_bounded_time(
    engine: RunningEngine, committed, served_name: str
) -> None:
    door = TamperedEngine(engine.socket)
    checkpoint = committed(1)

    async def scenario() -> None:
        client = EngineClient(door.socket, control_seconds=4.0)
        for path in (LOAD, VERIFY, SCORE):
            door.fault = Fault(silent=frozenset({path}))
            begun = time.monotonic()
            with pytest.raises(VerificationError, match=f"{path}: no answer within 4 s"):
                await AdapterVerifier([client], served_name).verify(checkpoint)
            assert time.monotonic() - begun < 60
            door.fault = Fault()
            assert f"{served_name}@v1" not in await client.adapters()
        await client.close()

    try:
        asyncio.run(scenario())
    finally:
        door.close()


def test_c35_a_version_in_use_is_not_unloaded(with_client, committed, served_name: str) -> None:
    held = Counter[int]({1: 1})

    async def scenario(client: EngineClient) -> None:
        verifier = AdapterVerifier([client], served_name)
        for version in (1, 2, 3):
            await verifier.verify(committed(version))
        assert await verifier.unload_unused(lambda version: version < 3 and not held[version]) == [2]
        assert await sample(client, f"{served_name}@v1") == 200
        assert await sample(client, f"{served_name}@v2") == 404
        held.clear()
        assert await verifier.unload_unused(lambda version: version < 3 and not held[version]) == [1]
        assert await sample(client, f"{served_name}@v1") == 404
        assert await sample(client, f"{served_name}@v3") == 200

    with_client(scenario)


def test_c36_a_loaded_adapter_is_not_read_again_with_each_request(
    with_client, engine, served_name: str, tmp_path: Path
) -> None:
    place = write_adapter(tmp_path / "place", engine.model, seed=1)

    async def scenario(client: EngineClient) -> None:
        name = f"{served_name}@v1"
        await client.load_adapter(name, place)
        before = await client.score(name, SEQUENCE)
        write_adapter(place, engine.model, seed=2)
        assert await client.score(name, SEQUENCE) == before

    with_client(scenario)


def test_c40_a_version_staged_by_a_gateway_that_died_is_published_by_the_next(
    with_client, committed, served_name: str
) -> None:
    checkpoint = committed(1)

    async def scenario(client: EngineClient) -> None:
        await client.load_adapter(f"{served_name}@v1", checkpoint.adapter)
        proof = await AdapterVerifier([client], served_name).verify(checkpoint)
        assert proof.modules == 28

    with_client(scenario)


def test_a_served_version_comes_back_to_an_engine_that_forgot_it(
    with_client, committed, served_name: str
) -> None:
    checkpoint = committed(1)

    async def scenario(client: EngineClient) -> None:
        verifier = AdapterVerifier([client], served_name)
        await verifier.verify(checkpoint)
        await client.unload_adapter(f"{served_name}@v1")  # as a restart leaves it
        proof = await verifier.verify_on([client], checkpoint)
        assert proof.max_error < 2e-4
        assert await sample(client, f"{served_name}@v1") == 200

    with_client(scenario)


def test_c25_fifty_swaps_of_the_same_weights_change_nothing(
    with_client, committed, served_name: str, tmp_path: Path
) -> None:
    """lr = 0: what drifts is not training. Each swap is a publication under a new name, old ones retired."""
    first = committed(1)

    async def scenario(client: EngineClient) -> None:
        verifier = AdapterVerifier([client], served_name)
        base = await client.score("base", SEQUENCE)
        served: list[list[float]] = []
        for version in range(1, 51):
            checkpoint = _again(first, version)
            await verifier.verify(checkpoint)
            served.append(await client.score(verifier.name(version), SEQUENCE))
            await verifier.unload_unused(lambda old, newest=version: old < newest - 1)
        assert await client.score("base", SEQUENCE) == base
        drift = max(abs(a - b) for later in served for a, b in zip(served[0], later, strict=True))
        assert drift == 0
        assert max(abs(a - b) for a, b in zip(served[0], base, strict=True)) > 0.1

    with_client(scenario)


def _again(checkpoint: Checkpoint, version: int) -> Checkpoint:
    return Checkpoint(checkpoint.folder, checkpoint.manifest | {"version": version}, checkpoint.state)
