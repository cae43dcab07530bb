"""How long a publication takes: `python -m tests.bench.publication` (runtime's environment, ~1 min).

Prints one JSON object: seconds from a committed checkpoint to "served and proven" (staged, compared tensor by
tensor, scored against the trainer's logprobs), on an idle engine and with 64 requests in flight all the time;
how many requests were answered meanwhile and how many failed. p50 and p90 over the publications.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

from runtime.gateway.engines.engine_client import EngineClient
from runtime.gateway.engines.version_check import AdapterVerifier
from runtime.shared.checkpoint import Checkpoint
from tests.bench.lora_cost import MODEL, REQUESTS, running
from tests.runtime.adapters import commit, write_adapter

PUBLICATIONS, PROMPT, SAMPLED = 20, 160, 20


async def measure(socket: Path, checkpoints: list[Checkpoint]) -> dict[str, object]:
    """Idle first, then under load."""
    client = EngineClient(socket)
    end = time.monotonic() + 240
    while not await client.health():
        assert time.monotonic() < end, "the engine did not start"
        await asyncio.sleep(0.2)
    verifier = AdapterVerifier([client], "policy")
    half = len(checkpoints) // 2
    idle = await _publish(verifier, checkpoints[:half])
    answered: Counter[int] = Counter()
    load = [asyncio.create_task(_ask_on(client, verifier, answered)) for _ in range(REQUESTS)]
    await asyncio.sleep(2)
    loaded = await _publish(verifier, checkpoints[half:])
    for task in load:
        task.cancel()
    await asyncio.gather(*load, return_exceptions=True)
    await client.close()
    failed = sum(count for status, count in answered.items() if status != 200)
    return {"idle": idle, "loaded": loaded, "answered": answered[200], "failed": failed}


async def _publish(verifier: AdapterVerifier, checkpoints: list[Checkpoint]) -> dict[str, float]:
    seconds = []
    for checkpoint in checkpoints:
        started = time.monotonic()
        await verifier.verify(checkpoint)
        seconds.append(time.monotonic() - started)
        await verifier.unload_unused(lambda version, newest=checkpoint.version: version < newest - 1)
    cuts = statistics.quantiles(seconds, n=10)
    return {"p50_seconds": round(statistics.median(seconds), 4), "p90_seconds": round(cuts[8], 4)}


async def _ask_on(client: EngineClient, verifier: AdapterVerifier, answered: Counter[int]) -> None:
    """One caller that never rests; it asks the newest adapter that is loaded."""
    while True:
        names = await client.adapters()
        model = max(names, key=lambda name: int(name.rpartition("v")[2]))
        prompt = [random.randrange(3, 800) for _ in range(PROMPT)]
        body = {"model": model, "prompt": prompt, "max_tokens": SAMPLED, "ignore_eos": True, "logprobs": 0}
        async with client.post("/v1/completions", json.dumps(body).encode()) as response:
            await response.read()
            answered[response.status] += 1


def main() -> None:
    """One engine, one JSON object."""
    with tempfile.TemporaryDirectory(prefix="slip-") as place:
        folder = Path(place)
        sequence = random.Random(0).choices(range(3, 800), k=PROMPT + SAMPLED)
        checkpoints = [
            commit(
                folder / "checkpoints",
                MODEL,
                write_adapter(folder / "adapter", MODEL, seed=version),
                version=version,
                sequence=sequence,
                prompt=PROMPT,
            )
            for version in range(1, 2 * PUBLICATIONS + 1)
        ]
        with running(folder, None) as socket:
            found = asyncio.run(measure(socket, checkpoints))
    machine = {"cores": len(os.sched_getaffinity(0)), "load_average": os.getloadavg()[0]}
    print(json.dumps({"bench": "publication"} | machine | found))


if __name__ == "__main__":
    main()
