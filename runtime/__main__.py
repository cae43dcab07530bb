"""The supervisor: starts the gateway, the engines and the trainer, keeps them running, ends them in order.

    python -m runtime --config STATE/runtime.json        (the token on the first line of stdin)

Neighbours: the keeper is its parent and passes the token through; supervision.py does the work. It serves no
HTTP: the gateway reads `supervisor.json`. All children start at once, because imports take longest. The
exception is a trainer on the GPU of an engine whose cache size is not set: that engine counts any memory the
GPU loses during its start as its own, and ends if the GPU gains some (vLLM's gpu_worker.py,
determine_available_memory).
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from runtime import gpus
from runtime.health import EngineHealth, HttpHealth, TrainerHealth
from runtime.recipes.command import trainer_command
from runtime.shared.runtime_config import RuntimeConfig
from runtime.shared.stdin_token import read_token
from runtime.supervision import ChildSpec, Supervisor, stop_on

# The trainer ends between two steps: a step begun is finished and committed when it fits into this.
TRAINER_STOP_SECONDS = 30.0


def children(config_path: Path, config: RuntimeConfig, token: bytes) -> list[ChildSpec]:
    """The children. They stop in this order: the trainer (it saves), the gateway, the engines."""
    state_dir, socket_dir = Path(config.state_dir), Path(config.socket_dir)
    logs = state_dir / "logs"
    told = ["--config", str(config_path)]
    for_trainer, for_engines = None, [None] * config.engines
    if config.device == "cuda":
        for_trainer, for_engines = gpus.assign_gpus(
            gpus.visible_gpus(), config.train_processes, config.engines
        )
    trainer = ChildSpec(
        name="trainer",
        command=trainer_command(config),
        log=logs / "trainer.log",
        check=TrainerHealth(state_dir / "trainer.json"),
        start_seconds=config.start_seconds,
        unresponsive_seconds=0.0,  # the check itself waits for a standstill
        stop_seconds=TRAINER_STOP_SECONDS,
        stop_rank=0,
        secrets=frozenset({"HF_TOKEN", "WANDB_API_KEY"}),
        gpus=for_trainer,
        starts_after=frozenset() if config.engine.kv_cache_gib else _shares_gpu(for_trainer, for_engines),
    )
    gateway = ChildSpec(
        name="gateway",
        command=[sys.executable, "-m", "runtime.gateway.gateway", *told],
        log=logs / "gateway.log",
        check=HttpHealth(socket_dir / "gateway.sock", "/healthz"),
        stdin_line=token,
        start_seconds=120.0,
        stop_seconds=5.0,
        stop_rank=1,
        is_vital=True,
    )
    engines = [
        ChildSpec(
            name=f"engine-{index}",
            command=[sys.executable, "-m", "runtime.engine.server", *told, "--index", str(index)],
            log=logs / f"engine-{index}.log",
            check=EngineHealth(socket_dir / f"engine-{index}.sock", on_cpu=config.device == "cpu"),
            start_seconds=config.start_seconds,
            stop_rank=2,
            secrets=frozenset({"HF_TOKEN"}),
            gpus=for_engines[index],
        )
        for index in range(config.engines)
    ]
    return [trainer, gateway, *engines]


def _shares_gpu(for_trainer: list[str] | None, for_engines: Sequence[list[str] | None]) -> frozenset[str]:
    """The engines that share a GPU with the trainer."""
    shared = (
        f"engine-{index}" for index, own in enumerate(for_engines) if set(own or ()) & set(for_trainer or ())
    )
    return frozenset(shared)


async def supervise(config_path: Path, token: bytes) -> int:
    """Run until SIGTERM; the exit code."""
    config = RuntimeConfig.model_validate_json(config_path.read_text())
    for folder in (Path(config.state_dir), Path(config.state_dir) / "logs"):
        folder.mkdir(parents=True, exist_ok=True)
    Path(config.socket_dir).mkdir(parents=True, exist_ok=True, mode=0o700)
    Path(config.socket_dir).chmod(0o700)
    stop = asyncio.Event()
    stop_on((signal.SIGTERM, signal.SIGINT), stop.set)
    return await Supervisor(Path(config.state_dir), children(config_path, config, token)).run(stop)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="runtime", description="Supervises the runtime's processes.")
    parser.add_argument("--config", required=True, help="state_dir/runtime.json")
    config_path = Path(parser.parse_args(arguments).config).resolve()
    token = read_token()
    if not token:
        print("supervisor: no token on the first line of stdin", file=sys.stderr)  # noqa: T201 - its one message
        return 2
    return asyncio.run(supervise(config_path, token))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
