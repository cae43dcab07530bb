"""A version that is named: its own weights, loaded again and proven again, or an error that says so (C55).

A real gateway over checkpoints of our making; the engine's answers are made up (pretend_engine.py). A real
engine brings a version back in test_publication_faults.py.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from runtime.gateway.gateway import build_components
from runtime.gateway.http.openai_errors import ApiError
from runtime.gateway.steps.text_members import TextMembers
from runtime.gateway.versions.versions import MAX_RELOADED, Versions
from runtime.shared import json_files
from runtime.shared.checkpoint import MAX_PINNED, CheckpointStore, checkpoint_name
from runtime.shared.runtime_config import RuntimeConfig
from runtime.shared.schema import Group, Member
from tests.runtime.gateway_process import MESSAGES, TOKEN, Gateway
from tests.runtime.pretend_engine import PretendEngine
from tests.support.waiting import wait_until

NEWEST = MAX_RELOADED + 4
TOKENS, PROMPT = 12, 4
# A version that was begun comes in milliseconds; a version that was given up comes never.
COMES_SECONDS = 20.0


def committed(root: Path, version: int) -> None:
    """The checkpoint of a version, with weights and a probe that no other has."""
    generator = np.random.default_rng(version)
    base = np.linspace(-3.0, -1.0, TOKENS, dtype=np.float32)

    def write(partial: Path) -> None:
        (partial / "adapter").mkdir()
        weights = {"a": generator.normal(size=8).astype(np.float32)}
        save_file(weights, partial / "adapter" / "adapter_model.safetensors")
        probe = {
            "tokens": np.arange(3, 3 + TOKENS),
            "offsets": np.array([0, TOKENS]),
            "sampled": (np.arange(TOKENS) >= PROMPT).astype(np.uint8),
            "logprobs_policy": base + np.float32(0.1 * version),
            "logprobs_base": base,
        }
        save_file(probe, partial / "probe.safetensors")

    CheckpointStore(root).commit(version, version, {"counts": {}}, write)


@dataclass
class World:
    """A gateway that serves the newest of many versions."""

    gateway: Gateway
    engine: PretendEngine

    @property
    def checkpoints(self) -> Path:
        return self.gateway.folder / "checkpoints"

    def ask(self, model: str | int) -> httpx.Response:
        """One answer of a version, or of a name."""
        name = model if isinstance(model, str) else f"policy@v{model}"
        return self.gateway.chat(model=name, messages=[{"role": "user", "content": name}])

    def answered(self, version: int) -> None:
        """It answers, by its own name, and the engine has its own weights under it."""
        answer = self.ask(version)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-slipway-policy-version"] == str(version)
        assert answer.json()["model"] == f"policy@v{version}"

    def refused(self, version: int, status: int = 404) -> dict[str, Any]:
        """It does not answer, and nobody else does in its place."""
        before = self.engine.asked.total()
        answer = self.ask(version)
        assert answer.status_code == status, answer.text
        assert self.engine.asked.total() == before
        assert f"policy@v{version}" in answer.json()["error"]["message"]
        return answer.json()["error"]

    def recalled(self) -> list[int]:
        """The versions that came back, by the record."""
        lines = (self.gateway.folder / "publications.jsonl").read_text().splitlines()
        return [line["version"] for line in map(json.loads, lines) if line["outcome"] == "recalled"]

    def names(self) -> set[str]:
        return {model["id"] for model in self.gateway.http.get("/v1/models").json()["data"]}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    for version in range(1, NEWEST + 1):
        committed(tmp_path / "checkpoints", version)
    said_of(tmp_path, 4, "0" * 64)
    with serving(tmp_path, NEWEST) as world:
        yield world


def said_of(folder: Path, version: int, sha256: str) -> None:
    """What an earlier process wrote of a version that it served."""
    json_files.append_line(
        folder / "publications.jsonl", {"version": version, "outcome": "published", "sha256": sha256}
    )


@contextmanager
def serving(tmp_path: Path, newest: int) -> Iterator[World]:
    """A gateway over what was committed."""
    sockets = Path(tempfile.mkdtemp(prefix="slip-"))
    engine = PretendEngine(sockets / "e.sock")
    gateway = Gateway(tmp_path, engine.socket, tmp_path).until_ready()
    try:
        wait_until(lambda: gateway.status()["version"] == newest, what="the newest is served")
        yield World(gateway, engine)
    finally:
        gateway.stop()
        engine.close()
        shutil.rmtree(sockets)


def test_c55_a_version_that_is_named_answers_with_its_own_weights_however_many_are_newer(
    world: World,
) -> None:
    for version in (1, 7, NEWEST - 1, 1):
        world.answered(version)
        folder = world.checkpoints / checkpoint_name(version) / "adapter"
        assert world.engine.adapters[f"policy@v{version}"].samefile(folder)
    world.answered(NEWEST)
    assert world.ask("policy").headers["x-slipway-policy-version"] == str(NEWEST)
    assert world.ask("base").headers["x-slipway-policy-version"] == "0"
    lines = (world.gateway.folder / "publications.jsonl").read_text().splitlines()
    recalled = [line for line in map(json.loads, lines) if line["outcome"] == "recalled"]
    assert [line["version"] for line in recalled] == [1, 7, NEWEST - 1]
    assert all(line["probe_tokens"] == TOKENS - PROMPT and line["max_error"] < 1e-6 for line in recalled)


def test_c55_a_version_whose_weights_are_gone_is_refused_by_name_with_those_that_answer(world: World) -> None:
    assert {f"policy@v{version}" for version in range(NEWEST + 1)} | {"policy", "base"} == world.names()
    shutil.rmtree(world.checkpoints / checkpoint_name(2))
    error = world.refused(2)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "no longer kept" in error["message"] and "policy@v3" in error["message"]
    assert "pin" in error["message"] and "`base` is the model before training" in error["message"]
    assert "policy@v2" not in world.names()
    assert world.gateway.http.get("/v1/models/policy@v2").status_code == 404
    assert "does not exist" in world.refused(NEWEST + 1)["message"]


def test_c55_weights_that_are_not_what_was_served_never_answer_under_its_name(world: World) -> None:
    said = world.refused(4)["message"]
    assert "different weights are saved now" in said and said.count("policy@v4") == 1, (
        "it is not among those that answer"
    )
    damaged = world.checkpoints / checkpoint_name(3) / "adapter" / "adapter_model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert "incomplete" in world.refused(3)["message"]
    assert not {"policy@v3", "policy@v4"} & world.engine.adapters.keys()


def test_c55_a_version_is_proven_again_before_it_answers(world: World) -> None:
    world.engine.off = 0.01
    error = world.refused(5, 503)
    assert error["code"] == "version_not_proven" and "logprobs differ" in error["message"]
    assert "policy@v5" not in world.engine.adapters
    world.engine.off = 0.0
    world.answered(5)


def test_c55_versions_that_are_named_are_bounded_in_number_and_come_back_whenever_they_are(
    world: World,
) -> None:
    named = [version for version in range(1, NEWEST) if version != 4]
    assert len(named) > MAX_RELOADED
    for version in (*named, *named):
        world.answered(version)
        assert len(world.engine.adapters) <= MAX_RELOADED + 1, "and the newest"
    log = (world.gateway.folder / "gateway.log").read_text()
    assert "policy@v1 is unloaded to make room" in log
    assert world.recalled() == named, "each once: the record does not grow with the requests"
    assert log.count("policy@v1 is loaded again, and proven") == 2


def test_c55_versions_that_many_name_at_once_are_each_their_own(world: World) -> None:
    named = [version for version in range(1, NEWEST) if version != 4] * 4

    def until_answered(version: int) -> httpx.Response:
        def answer() -> httpx.Response | None:
            said = world.ask(version)  # 503: the others are all in use, ask again
            assert said.status_code == 200 or int(said.headers["retry-after"]) > 0, said.text
            return said if said.status_code == 200 else None

        return wait_until(answer)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(until_answered, named))
    assert [int(answer.headers["x-slipway-policy-version"]) for answer in answers] == named
    assert [answer.json()["model"] for answer in answers] == [f"policy@v{version}" for version in named]


def test_c55_a_version_that_is_named_comes_back_though_who_named_it_has_left(world: World) -> None:
    """Clients whose patience is shorter than it takes: each began it anew, and left it half loaded."""
    world.engine.loads.clear()
    with socket.socket(socket.AF_UNIX) as leaving:
        leaving.connect(str(Path(world.gateway.config["socket_dir"]) / "gateway.sock"))
        body = json.dumps({"model": "policy@v1", "messages": MESSAGES}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        leaving.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: "policy@v1" in world.engine.loading)
    for _ in range(3):
        world.gateway.status()  # by then it has seen who left
    world.engine.loads.set()
    wait_until(lambda: world.recalled() == [1], COMES_SECONDS, lambda: str(world.recalled()))
    world.answered(1)
    assert world.engine.loading.count("policy@v1") == 1


def test_c55_of_a_name_that_was_published_twice_the_last_weights_count(world: World) -> None:
    """Once on a machine that was lost, and once more after the run had gone back to an earlier step."""
    kept = {version: CheckpointStore(world.checkpoints).load(checkpoint_name(version)) for version in (5, 6)}
    with (world.gateway.folder / "publications.jsonl").open("a") as record:
        for version, sha256 in (
            (5, "0" * 64), (5, kept[5].adapter_sha256),
            (6, kept[6].adapter_sha256), (6, "0" * 64),
        ):  # fmt: skip
            line = {"version": version, "outcome": "published", "sha256": sha256}
            record.write(json.dumps(line) + "\n")
    world.answered(5)
    assert "different weights are saved now" in world.refused(6)["message"]


def test_c55_an_engine_that_forgot_a_version_is_given_it_again(world: World) -> None:
    world.answered(1)
    world.engine.adapters.clear()
    world.answered(1)
    world.answered(NEWEST)


def test_a_version_is_pinned_by_its_own_name(world: World) -> None:
    pinned = world.gateway.http.post("/slipway/checkpoints/policy@v3/pin")
    assert (pinned.status_code, pinned.json()["name"], pinned.json()["pinned"]) == (200, "step-000003", True)
    assert world.gateway.http.post("/slipway/checkpoints/policy@v99/pin").status_code == 404


def test_a_checkpoint_that_is_not_whole_is_refused_to_be_pinned_as_none(world: World) -> None:
    damaged = world.checkpoints / checkpoint_name(3) / "adapter" / "adapter_model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    answer = world.gateway.http.post("/slipway/checkpoints/policy@v3/pin")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert "does not match the manifest" in answer.json()["error"]["message"]


def test_c55_so_many_are_pinned_and_what_goes_is_named(world: World) -> None:
    names = [checkpoint_name(version) for version in range(1, NEWEST + 1)]
    others = [f"step-{step:06d}" for step in range(101, 101 + MAX_PINNED - 1)]
    for name in others:
        (world.checkpoints / name).mkdir()
    (world.checkpoints / "pinned.json").write_text(json.dumps([names[0], *others]))
    pinned = world.gateway.http.post("/slipway/checkpoints/policy@v2/pin").json()
    assert (pinned["name"], pinned["let_go"]) == (names[1], [names[0]])
    listed = world.gateway.http.get("/slipway/checkpoints").json()
    assert {it["name"]: it["pinned"] for it in listed} == {name: name == names[1] for name in names}


def test_a_version_was_created_when_it_was_committed(world: World) -> None:
    found = world.gateway.http.get("/v1/models/policy@v3").json()
    folder = world.checkpoints / checkpoint_name(3)
    assert found["created"] == int(folder.stat().st_mtime)


# ------------------------------------------------------------------ a number that was given out twice

REWOUND_TO, AGAIN = 3, 6


@pytest.fixture
def rewound(tmp_path: Path) -> Iterator[World]:
    """A machine begun at version 3 of one that had come to 5; it has come to 6 since."""
    for version in range(1, AGAIN + 1):
        committed(tmp_path / "checkpoints", version)
        if version > REWOUND_TO:
            said_of(tmp_path, version, "0" * 64)
            said_of(tmp_path, version, sha256_of(tmp_path / "checkpoints", version))
    (tmp_path / "rewound.json").write_text(
        json.dumps({"to_step": REWOUND_TO + 1, "reused_after": REWOUND_TO})
    )
    with serving(tmp_path, AGAIN) as world:
        yield world


def sha256_of(checkpoints: Path, version: int) -> str:
    return CheckpointStore(checkpoints).load(checkpoint_name(version)).adapter_sha256


def test_c55_a_number_that_a_lost_machine_gave_out_before_answers_by_its_weights_alone(
    rewound: World,
) -> None:
    for version in (REWOUND_TO + 1, AGAIN):
        sha256 = sha256_of(rewound.checkpoints, version)
        said = rewound.refused(version, 409)
        assert said["code"] == "version_reused"
        assert f"now belongs to `policy@v{version}+{sha256[:12]}`" in said["message"]
        assert f"version numbers after {REWOUND_TO} were used again" in said["message"]
        answer = rewound.ask(f"policy@v{version}+{sha256[:12]}")
        assert (answer.status_code, answer.headers["x-slipway-policy-version"]) == (200, str(version))
        assert rewound.ask(f"policy@v{version}+{'0' * 12}").status_code == 409
    rewound.answered(REWOUND_TO)
    assert rewound.ask("policy").headers["x-slipway-policy-version"] == str(AGAIN)


def test_c55_a_version_that_only_a_lost_machine_had_published_answers_with_its_own_weights(
    rewound: World,
) -> None:
    """Its publication has failed here, so that the last line of its number is of other weights."""
    said_of(rewound.gateway.folder, 5, "0" * 64)
    name = f"policy@v5+{sha256_of(rewound.checkpoints, 5)[:12]}"
    assert name in rewound.names()
    answer = rewound.ask(name)
    assert (answer.status_code, answer.headers["x-slipway-policy-version"]) == (200, "5"), answer.text


def test_c55_names_that_are_listed_mean_one_version_each_and_can_be_pinned(rewound: World) -> None:
    listed = rewound.names()
    assert {"policy", "base", "policy@v0", "policy@v3"} < listed and len(listed) == AGAIN + 3
    assert not {"policy@v4", "policy@v6"} & listed
    for name in listed:
        assert rewound.gateway.http.get(f"/v1/models/{name}").status_code == 200
    full = next(name for name in listed if name.startswith("policy@v5"))
    pinned = rewound.gateway.http.post(f"/slipway/checkpoints/{full}/pin")
    assert (pinned.status_code, pinned.json()["name"]) == (200, "step-000005")
    assert pinned.json()["weights"] == sha256_of(rewound.checkpoints, 5)
    for name in ("policy@v5", f"policy@v5+{'0' * 12}"):
        assert rewound.gateway.http.post(f"/slipway/checkpoints/{name}/pin").status_code == 409
        restored = rewound.gateway.http.post(f"/slipway/checkpoints/{name}/restore", json={"key": name})
        assert restored.status_code == 409


def test_c55_a_name_with_its_weights_is_understood_where_no_machine_was_lost(world: World) -> None:
    sha256 = sha256_of(world.checkpoints, 5)
    assert world.ask(f"policy@v5+{sha256}").status_code == 200
    other = world.ask(f"policy@v5+{'0' * 12}")
    assert (other.status_code, other.json()["error"]["code"]) == (409, "version_reused")
    assert world.ask(f"policy@v5+{sha256[:4]}").status_code == 404, "too short to tell"


# ------------------------------------------------------------------ which goes


def test_c35_a_version_that_came_back_stays_while_training_goes_on_until_others_need_its_place(
    tmp_path: Path,
) -> None:
    many = range(1, 100)
    versions = Versions(tmp_path / "serving.json", "policy", keep=2, kept=lambda: dict.fromkeys(many, 0))
    versions.move(60, 60)
    for version in many[:MAX_RELOADED]:
        assert not versions.is_loaded(version) and versions.make_room() is None
        versions.mark_reloaded(version)
    versions.move(61, 61)
    assert not any(versions.retire(version) for version in many[:MAX_RELOADED])
    versions.resolve("policy@v1")  # named again: it is the last to go now
    versions.acquire(2)
    assert versions.make_room() == 3
    versions.mark_reloaded(50)
    assert versions.is_loaded(2) and not versions.is_loaded(3) and versions.is_loaded(1)


def test_c35_a_version_that_a_text_is_scored_under_is_held_before_an_engine_is_free(tmp_path: Path) -> None:
    config = {"run_id": "test", "model_path": "", "state_dir": str(tmp_path), "socket_dir": str(tmp_path)}

    async def scenario() -> bool:
        parts = build_components(RuntimeConfig.model_validate(config))
        parts.pool.was_ready = True  # they are away for a moment
        parts.versions.move(1, 1)
        group = Group(id="g", members=[Member(messages=MESSAGES, completion="x", reward=1.0)])
        texts = TextMembers(parts.samples, parts.pool, parts.versions)
        resolving = asyncio.create_task(texts.resolve([group], lambda _: False))
        for _ in range(10):  # as far as it comes without an engine
            await asyncio.sleep(0)
        for version in range(2, 10):
            parts.versions.move(version, version)
        may_go = parts.versions.retire(1)
        resolving.cancel()
        await asyncio.gather(resolving, return_exceptions=True)
        assert parts.versions.retire(1) or may_go
        return may_go

    assert not asyncio.run(scenario())


def test_when_every_older_version_is_in_use_another_is_told_to_come_back(tmp_path: Path) -> None:
    versions = Versions(tmp_path / "serving.json", "policy", keep=2)
    for version in range(1, MAX_RELOADED + 1):
        versions.acquire(version)
        versions.mark_reloaded(version)
    with pytest.raises(ApiError) as caught:
        versions.make_room()
    assert (caught.value.status, caught.value.retry_after_seconds) == (503, 1)
