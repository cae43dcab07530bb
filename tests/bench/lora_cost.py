"""What one adapter costs on the CPU: `python -m tests.bench.lora_cost` (runtime's environment, ~2 min).

Prints one JSON object: seconds of 64 concurrent requests (160 prompt + 20 sampled tokens, no cache hits) with
one adapter and with the base, in turn, on vLLM's own LoRA path and on ours; medians over the rounds.
Formula: ratio = median(adapter) / median(base) of the same engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from runtime.engine import command, server
from runtime.gateway.engines.engine_client import EngineClient, EngineError
from runtime.shared.runtime_config import RuntimeConfig
from tests.runtime.adapters import write_adapter

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "runtime" / "tiny" / "model"
REQUESTS, PROMPT, SAMPLED, ROUNDS = 64, 160, 20, 5
# The engine as it is, but for our LoRA path.
_STOCK = "import runtime.engine.worker as w, runtime.engine.server as e; w.install = lambda: None; e.main()"


@contextlib.contextmanager
def running(folder: Path, code: str | None) -> Iterator[Path]:
    """An engine whose program is ours, or `code`; its socket."""
    told = {"run_id": "bench", "model_path": str(MODEL), "state_dir": str(folder), "socket_dir": str(folder)}
    config = RuntimeConfig.model_validate(told)
    (folder / "runtime.json").write_text(config.model_dump_json())
    program = ["-m", "runtime.engine.server"] if code is None else ["-c", code]
    # What the engine would start itself again with; `-c` could not.
    environ = os.environ | command.environment(config, 0) | {server.ENVIRONMENT_MARK: "1", "PYTHONPATH": "."}
    with (folder / "engine.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *program, "--config", str(folder / "runtime.json")],
            cwd=REPOSITORY,
            env=environ,
            stdout=log,
            stderr=log,
        )
    try:
        yield command.socket_path(config, 0)
    finally:
        process.terminate()
        process.wait(timeout=30)


async def measure(socket: Path, adapter: Path) -> dict[str, float]:
    """Median seconds of a round of requests, base and adapter in turn."""
    client = EngineClient(socket)
    end = time.monotonic() + 240
    while not await _answers(client):
        assert time.monotonic() < end, "the engine did not start"
        await asyncio.sleep(0.2)
    await client.load_adapter("policy@v1", adapter)
    seconds: dict[str, list[float]] = {"base": [], "policy@v1": []}
    for round_index in range(ROUNDS + 1):
        for model, taken in seconds.items():
            started = time.monotonic()
            await asyncio.gather(*(_one(client, model) for _ in range(REQUESTS)))
            if round_index:  # the first warms up
                taken.append(time.monotonic() - started)
    await client.close()
    base, policy = (round(statistics.median(taken), 3) for taken in seconds.values())
    return {"base_seconds": base, "adapter_seconds": policy, "ratio": round(policy / base, 3)}


async def _answers(client: EngineClient) -> bool:
    """Not `health`: the stock engine lacks our worker's methods."""
    try:
        return bool(await client.context_length())
    except EngineError:
        return False


async def _one(client: EngineClient, model: str) -> None:
    prompt = [random.randrange(3, 800) for _ in range(PROMPT)]
    body = {"model": model, "prompt": prompt, "max_tokens": SAMPLED, "ignore_eos": True, "logprobs": 0}
    async with client.post("/v1/completions", json.dumps(body).encode()) as response:
        assert response.status == 200, await response.text()
        await response.read()


def main() -> None:
    """Both paths, one JSON object."""
    found: dict[str, object] = {
        "bench": "lora_cost",
        "requests": REQUESTS,
        "tokens": [PROMPT, SAMPLED],
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.processor() or platform.machine(),
        "load_average": os.getloadavg()[0],
    }
    for name, code in (("stock", _STOCK), ("dense", None)):
        with tempfile.TemporaryDirectory(prefix="slip-") as place:
            adapter = write_adapter(Path(place) / "adapter", MODEL, seed=1)
            with running(Path(place), code) as socket:
                found[name] = asyncio.run(measure(socket, adapter))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
