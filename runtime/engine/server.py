"""One vLLM server: `python -m runtime.engine.server --config runtime.json --index 0`.

Serves vLLM's OpenAI API on the Unix socket `socket_dir/engine-0.sock`; the supervisor starts it, the gateway
is its only client (engine_client.py), command.py has vLLM's arguments, worker.py our additions inside it.
With worker.py, norms.py, one_token_prefills.py, http_speedups.py and last_turn_parsing.py the only importer
of vLLM. Knows nothing of versions.

Start-up is imports. So they happen once: the engine core is forked from this process instead of spawned, runs
the model in its own process instead of a third one, and the model's class is inspected here instead of in a
fourth. Some packages that no engine here uses are left out. If the core must be spawned (vLLM does so once
CUDA is initialised, or VLLM_WORKER_MULTIPROC_METHOD asks for it) it is the same engine, up later.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import AsyncIterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from runtime.engine import last_turn_parsing
from runtime.engine.command import (
    WORKER_MODULE,
    arguments,
    environment,
    model_description,
    scratch_path,
    socket_path,
)
from runtime.shared import failpoints, imports, processes
from runtime.shared.language_model import is_multimodal
from runtime.shared.runtime_config import RuntimeConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# The time for requests in flight when the server ends: a dead core would let them wait for ever.
_ENDING_SECONDS = 2
ENVIRONMENT_MARK = "SLIPWAY_ENGINE_ENVIRONMENT"
# One is for quantised weights, which are refused before, the other for traces, which are not sent. vLLM and
# transformers ask whether they are installed.
_UNUSED_PACKAGES = ("torchao", "opentelemetry")
# Mends torch's compiler, for which it imports all of it. Nothing is compiled on a CPU.
_COMPILER_MENDED = "vllm.env_override"
_TORCHVISION = (
    "torchvision", "torchvision.transforms", "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)  # fmt: skip
# vLLM's own: how its engine core comes to be.
_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def main() -> None:
    """Start the server and stay until it ends; the exit code is 0 only after a requested stop."""
    parser = argparse.ArgumentParser(prog="runtime.engine.server")
    parser.add_argument("--config", type=Path, required=True, help="state_dir/runtime.json")
    parser.add_argument("--index", type=int, default=0)
    given = parser.parse_args()
    config = RuntimeConfig.model_validate_json(given.config.read_text())
    _enter_environment(environment(config, given.index))
    run(config, given.index, prepare(config, given.index))


def prepare(config: RuntimeConfig, index: int) -> Namespace:
    """Import everything. Returns vLLM's own arguments. This part takes long and may be done once for many
    engines."""
    _children_die_with_us()
    socket_path(config, index).unlink(missing_ok=True)
    scratch = scratch_path(config, index)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(mode=0o700)
    # Most objects of this process exist after it: without them vLLM's garbage collections during the start
    # take 2 s less.
    with imports.collecting_nothing():
        _skip_imports(config.device)
        if is_multimodal(model_description(config.model_path)):
            _stand_in_for_torchvision()
        args = _parse(arguments(config, index))
        if config.device == "cpu":
            _preload_model_class(config.model_path)
        last_turn_parsing.install()
        importlib.import_module(WORKER_MODULE)  # here, so that a core that is forked has them imported
    return args


def run(config: RuntimeConfig, index: int, args: Namespace) -> NoReturn:
    """Serve until stopped, and end this process."""
    scratch = scratch_path(config, index)
    scratch.mkdir(mode=0o700, exist_ok=True)
    failpoints.failpoint("engine.starting")
    well = _serve(args)
    shutil.rmtree(scratch, ignore_errors=True)
    _exit(well)


def _enter_environment(words: dict[str, str]) -> None:
    """Start this program again with `words` set: the loader and OpenMP read theirs only at exec."""
    if os.environ.pop(ENVIRONMENT_MARK, None) is not None:
        return
    environ = os.environ | words | {ENVIRONMENT_MARK: "1"}
    # Without byte code the same imports take twice as long.
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.execve(sys.executable, [sys.executable, "-m", "runtime.engine.server", *sys.argv[1:]], environ)


def _children_die_with_us() -> None:
    """Whatever kills this process, the engine core it forked goes with it (spawned: see below)."""
    prepared = []

    def before() -> None:
        prepared[:] = [processes.preexec(signal.SIGKILL)]

    os.register_at_fork(before=before, after_in_child=lambda: prepared[0]())


def _skip_imports(device: str) -> None:
    """Have these taken for not installed, or for empty: a sixth of the CPU time that all imports take."""
    for name in _UNUSED_PACKAGES:
        sys.modules[name] = None  # pyrefly: ignore[unsupported-operation] - the import system's own word
    if device == "cpu":
        sys.modules[_COMPILER_MENDED] = ModuleType(_COMPILER_MENDED)


def _stand_in_for_torchvision() -> None:
    """Where it is not installed, as there is none for a CPU, have its modules found empty.

    vLLM's multimodal models import it for images. Of their language model alone none is ever asked.
    """
    from transformers.utils.import_utils import is_torchvision_available

    if is_torchvision_available():  # the answer is kept: transformers goes on to know that it is not there
        return
    for name in _TORCHVISION:
        module = sys.modules[name] = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


def _parse(words: list[str]) -> Namespace:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(args)
    return args


def _preload_model_class(model: str) -> None:
    """Import the model's class here, so that vLLM does not start a process to look at it."""
    from vllm.model_executor.models.registry import ModelRegistry

    for name in model_description(model).get("architectures", []):
        if known := ModelRegistry.models.get(name):
            ModelRegistry.register_model(name, known.load_model_cls())


def _serve(args: Namespace) -> bool:
    """Serve until stopped. True: it was asked to stop; False: the engine core died."""
    import uvloop

    return uvloop.run(_serve_until_stopped(args))


async def _serve_until_stopped(args: Namespace) -> bool:
    """The body of vLLM's own `run_server`, with the engine core forked."""
    from vllm.entrypoints.launchers.api_server.entry import build_and_serve
    from vllm.entrypoints.launchers.launcher import setup_server
    from vllm.v1.engine.async_llm import AsyncLLM

    from runtime.engine import http_speedups

    class Engine(AsyncLLM):
        stopping = False

        def shutdown(self, timeout: float | None = None) -> None:
            self.stopping = True
            super().shutdown(timeout)

    address, sock = setup_server(args, reuse_port=False)
    os.chmod(args.uds, 0o600)
    kind = _with_failpoints(Engine) if failpoints.armed() else Engine
    engine = kind.from_vllm_config(_configure(args), disable_log_stats=args.disable_log_stats)
    http_speedups.install()
    try:
        ended = await build_and_serve(engine, address, sock, args, timeout_graceful_shutdown=_ENDING_SECONDS)
        was_stopped = engine.stopping
    finally:
        engine.shutdown(timeout=0)
    try:
        await ended
    finally:
        sock.close()
    return was_stopped


def _with_failpoints(engine: type[Any]) -> type[Any]:
    """The engine with the instants of an answer in it: only where one is armed, for this is the hot path."""

    class Watched(engine):
        async def generate(self, *args: Any, **settings: Any) -> AsyncIterator[Any]:
            failpoints.failpoint("engine.accepted")
            async for output in super().generate(*args, **settings):
                failpoints.failpoint("engine.streaming")
                yield output
            failpoints.failpoint("engine.answering")

    return Watched


def _configure(args: Namespace) -> VllmConfig:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    start_method = os.environ.get(_START_METHOD, "fork")
    engine_args = AsyncEngineArgs.from_cli_args(args)
    vllm_config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    os.environ[_START_METHOD] = start_method  # the CPU platform has just set spawn, whatever was set before
    return vllm_config


def _exit(well: bool) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if well else 1)


def _end_with_the_server() -> None:
    processes.die_with_parent(os.getppid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # an engine core that was spawned begins by reading this file
    _end_with_the_server()
