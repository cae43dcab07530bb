"""An engine on the GPU: forked or spawned, it proves what it holds; how long a publication takes."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime.gateway.engines.engine_client import EngineClient
from runtime.gateway.engines.version_check import AdapterVerifier, VersionCheck
from runtime.shared.checkpoint import Checkpoint
from tests.gpu.models import TINY
from tests.runtime.adapters import commit, write_adapter
from tests.runtime.conftest import EngineProcess, start_engine
from tests.support.measured import say
from tests.support.waiting import wait_until

# The first start compiles kernels and captures graphs.
START_SECONDS = 900.0
PROMPT, SAMPLED, PUBLICATIONS = 160, 20, 5


@contextmanager
def engine(folder: Path, model: Path, **settings: object) -> Iterator[EngineProcess]:
    """One on half of the GPU, as a run's on a card that it shares."""
    started = start_engine(
        folder,
        model_path=str(model),
        device="cuda",
        dtype="bfloat16",
        engine={"memory_fraction": 0.45},
        **settings,
    )

    def ready() -> bool:
        assert started.process.poll() is None, started.log.read_text(errors="replace")[-4000:]
        return started.answers()

    try:
        wait_until(ready, START_SECONDS)
        yield started
    finally:
        started.end()


def checkpoints(folder: Path, model: Path, count: int, size: float) -> list[Checkpoint]:
    """Versions of random adapters, with transformers' and peft's word for their logprobs."""
    sequence = random.Random(0).choices(range(3, 800), k=PROMPT + SAMPLED)
    return [
        commit(
            folder / "checkpoints",
            model,
            write_adapter(folder / "adapter", model, seed=version, size=size),
            version=version,
            sequence=sequence,
            prompt=PROMPT,
        )
        for version in range(1, count + 1)
    ]


async def prove(started: EngineProcess, versions: list[Checkpoint]) -> list[tuple[float, VersionCheck]]:
    """Publish one after the other; the seconds each took, and its proof."""
    client = EngineClient(started.socket)
    verifier = AdapterVerifier([client], "policy", "bfloat16")
    found = []
    for checkpoint in versions:
        begun = time.monotonic()
        proof = await verifier.verify(checkpoint)
        found.append((time.monotonic() - begun, proof))
        await verifier.unload_unused(lambda version, newest=checkpoint.version: version < newest - 1)
    await client.close()
    return found


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_an_engine_proves_the_adapter_that_it_holds_however_its_core_came_to_be(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: dict[str, Any]
) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", start)
    begun = time.monotonic()
    with engine(tmp_path, TINY) as started:
        ready_seconds = time.monotonic() - begun
        ((_, proof),) = asyncio.run(prove(started, checkpoints(tmp_path, TINY, 1, 0.3)))
    assert proof.modules > 0
    say(
        "engine: a version proven",
        core=start,
        ready_seconds=round(ready_seconds, 1),
        modules=proof.modules,
        mean_error=proof.mean_error,
        max_error=proof.max_error,
        effect_share=proof.effect_share,
        **card,
    )


def test_how_long_a_publication_takes(tmp_path: Path, served_model: Path, card: dict[str, Any]) -> None:
    begun = time.monotonic()
    with engine(tmp_path, served_model) as started:
        ready_seconds = time.monotonic() - begun
        found = asyncio.run(prove(started, checkpoints(tmp_path, served_model, PUBLICATIONS, 0.02)))
    took = [seconds for seconds, _ in found[1:]]
    say(
        "engine: publication",
        model="qwen2.5-1.5b's widths",
        ready_seconds=round(ready_seconds, 1),
        first_seconds=round(found[0][0], 3),
        median_seconds=round(statistics.median(took), 3),
        stage_seconds=round(statistics.median(proof.stage_seconds for _, proof in found), 3),
        probe_seconds=round(statistics.median(proof.probe_seconds for _, proof in found), 3),
        mean_error=max(proof.mean_error for _, proof in found),
        **card,
    )
