"""One vLLM server: `python -m runtime.engine.server --config runtime.json --index 0`.

Serves vLLM's OpenAI API on the Unix socket `socket_dir/engine-0.sock`; the supervisor starts it, the gateway
is its only client (engine_client.py), worker.py is what we add inside vLLM. With worker.py the only importer
of vLLM: the start-up command, in arguments and environment, is here and nowhere else.
Knows nothing of adapters, versions or training.

Start-up is imports. So they happen once: the engine core is forked from this process instead of spawned, runs
the model in its own process instead of a third one, and the model's class is inspected here instead of in a
fourth.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from runtime.shared import failpoints, processes
from runtime.shared.schema import RuntimeConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LOGPROBS_MODE = "processed_logprobs"
BASE_NAME = "base"
# Probes of a publication go before rollouts (0), and find a place beside a full batch.
SCORE_PRIORITY = -1
_PLACES_FOR_PROBES = 4
# How long the engine leaves an idle connection open; vLLM's own 5 s are about what a training step takes.
KEEP_ALIVE_SECONDS = 600
WORKER_EXTENSION = "runtime.engine.worker.WorkerExtension"

_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
# What an adapter of ours has (C14). Of a Llama, vLLM would wrap head and embeddings as well, and with those
# its CPU engine dies of the first request for prompt logprobs: a publication's probe.
_LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# The ranks vLLM has kernels for (vllm.config.lora.MaxLoRARanks).
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# vLLM starts only where its cache holds one sequence of full length: a model's own 128k would not fit here.
_LONGEST_CONTEXT = {"cpu": 8192, "cuda": 32768}
_SMALL_WEIGHTS_BYTES = 100 * 2**20
# What requests in flight have when the server ends: of a dead core they would wait for an answer for ever.
_ENDING_SECONDS = 2
# How a family of models writes tool calls, by the model_type of its config.json.
_TOOL_PARSERS = {"qwen2": "hermes", "qwen3": "hermes", "llama": "llama3_json", "mistral": "mistral"}
# The token without which vLLM's parser ends the engine at its start; not every Llama is a Llama 3.
_TOOL_TOKENS = {"llama3_json": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
ENVIRONMENT_MARK = "SLIPWAY_ENGINE_ENVIRONMENT"


def socket_path(config: RuntimeConfig, index: int) -> Path:
    """Where engine `index` listens."""
    return Path(config.socket_dir) / f"engine-{index}.sock"


def arguments(config: RuntimeConfig, index: int) -> list[str]:
    """vLLM's command line for engine `index`."""
    engine = config.engine
    words = ["--model", config.model_path, "--served-model-name", BASE_NAME]
    words += ["--uds", str(socket_path(config, index))]
    words += ["--dtype", config.dtype, "--logprobs-mode", LOGPROBS_MODE, "--enable-prefix-caching"]
    words += ["--max-num-seqs", str(engine.max_num_seqs + _PLACES_FOR_PROBES)]
    words += ["--scheduling-policy", "priority"]
    words += ["--max-model-len", str(engine.max_model_len or longest_context(config))]
    words += ["--enable-lora", "--max-lora-rank", str(_lora_rank(config.train.lora.rank))]
    words += ["--lora-target-modules", *_LORA_MODULES]
    # The served version, those rollouts may still be on, and the one being staged (C35).
    slots = max(engine.max_loras, config.max_staleness + 2)
    words += ["--max-loras", str(slots), "--max-cpu-loras", str(4 * slots)]
    words += ["--worker-extension-cls", WORKER_EXTENSION, "--distributed-executor-backend", _EXECUTOR]
    # The model's own top-p and penalties would change the support (C9).
    words += ["--generation-config", "vllm"]
    words += ["--disable-uvicorn-access-log"]
    # Left to itself vLLM takes what the first grammar asks for, and later ones fail that need another.
    words += ["--structured-outputs-config", json.dumps({"backend": "xgrammar"})]
    if parser := _tool_parser(config.model_path):
        words += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
    if config.device == "cpu":
        words += ["--enforce-eager", "--kv-cache-memory-bytes", str(_kv_cache_bytes(config))]
        # Of the memory node, and checked at start even where the cache's size is given.
        words += ["--gpu-memory-utilization", str(engine.memory_fraction or 0.1)]
    else:
        words += ["--gpu-memory-utilization", str(engine.memory_fraction or 0.9)]
    return words


def scratch_path(config: RuntimeConfig, index: int) -> Path:
    """Where vLLM's own sockets and rendezvous files go: it leaves them behind, so the folder goes with it."""
    return Path(config.socket_dir) / f"e{index}"


def environment(config: RuntimeConfig, index: int) -> dict[str, str]:
    """What vLLM and torch read from the environment, beyond what this process was given."""
    scratch = str(scratch_path(config, index))
    words = {
        "TMPDIR": scratch,
        "VLLM_RPC_BASE_PATH": scratch,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc, /server_info: on a socket in a 0700 folder only
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "VLLM_XGRAMMAR_CACHE_MB": "64",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_SECONDS),
        # torch.distributed and vLLM's own sockets: without these they take the machine's outward address.
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",  # its threads do not survive the fork
    }
    if Path(config.model_path).is_dir():
        words |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if config.device == "cpu":
        words |= _cpu_environment(config.model_path)
    return words


def longest_context(config: RuntimeConfig) -> int:
    """The model's own context length in tokens, capped by device."""
    described = _model_description(config.model_path)
    text = described.get("text_config", described)
    cap = _LONGEST_CONTEXT[config.device]
    return min(int(text.get("max_position_embeddings", cap)), cap)


def main() -> None:
    """Start the server and stay until it ends; the exit code is 0 only after a requested stop."""
    parser = argparse.ArgumentParser(prog="runtime.engine.server")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--index", type=int, default=0)
    given = parser.parse_args()
    config = RuntimeConfig.model_validate_json(given.config.read_text())
    _enter_environment(environment(config, given.index))
    run(config, given.index, prepare(config, given.index))


def prepare(config: RuntimeConfig, index: int) -> Namespace:
    """Import everything; vLLM's own arguments. What takes long and may be done once for many engines."""
    _children_die_with_us()
    socket_path(config, index).unlink(missing_ok=True)
    scratch = scratch_path(config, index)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(mode=0o700)
    gc.disable()  # nothing to collect while modules load
    args = _parse(arguments(config, index))
    if config.device == "cpu":
        _register_model(config.model_path)
    _install_worker_parts()
    # Most objects there will ever be: what vLLM collects on its way up takes 2 s less without them.
    gc.freeze()
    gc.enable()
    return args


def run(config: RuntimeConfig, index: int, args: Namespace) -> NoReturn:
    """Serve until stopped, and end this process."""
    scratch = scratch_path(config, index)
    scratch.mkdir(mode=0o700, exist_ok=True)
    failpoints.passing("engine.starting")
    well = _serve(args)
    shutil.rmtree(scratch, ignore_errors=True)
    _finish(well)


def _kv_cache_bytes(config: RuntimeConfig) -> int:
    """What is configured, but no more than two full batches of the longest sequences could ever fill."""
    configured = int(config.engine.kv_cache_gib * 2**30)
    described = _model_description(config.model_path)
    try:
        heads = described["num_attention_heads"]
        width = described.get("head_dim") or described["hidden_size"] // heads
        rows = 2 * described["num_hidden_layers"] * described.get("num_key_value_heads", heads)
    except KeyError:  # another kind of model: its own sizes are not known here
        return configured
    token = rows * width * (4 if config.dtype == "float32" else 2)
    length = config.engine.max_model_len or longest_context(config)
    return min(configured, 2 * (config.engine.max_num_seqs + _PLACES_FOR_PROBES) * length * token)


def _tool_parser(model: str) -> str | None:
    """vLLM's parser of this model's tool calls; None where it has none, or its tokenizer lacks the token."""
    parser = _TOOL_PARSERS.get(_model_description(model).get("model_type", ""))
    token = _TOOL_TOKENS.get(parser or "")
    if token is None:
        return parser
    tokenizer = _model_file(model, "tokenizer.json")
    return parser if tokenizer.is_file() and json.dumps(token) in tokenizer.read_text() else None


def _model_description(model: str) -> dict[str, Any]:
    """The model's config.json."""
    return json.loads(_model_file(model, "config.json").read_text())


def _model_file(model: str, name: str) -> Path:
    """A file of the model, from its folder or from the hub."""
    folder = Path(model)
    if folder.is_dir():
        return folder / name
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model, name))


def _lora_rank(rank: int) -> int:
    return next(size for size in _LORA_RANKS if size >= rank)


def _cpu_environment(model: str) -> dict[str, str]:
    words = {
        # The cores are shared with the trainer and the gateway: threads are not bound, and wait asleep.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(_threads(model)),
        "OMP_WAIT_POLICY": "PASSIVE",
        # No compiler is needed: vLLM compiles a helper on the first request that asks for logprobs.
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    # One OpenMP runtime in the process: vLLM's kernels ask for the system's, torch brings its own.
    if library := _torch_openmp():
        before = os.environ.get("LD_PRELOAD", "")
        words["LD_PRELOAD"] = f"{before}:{library}" if before else str(library)
    return words


def _threads(model: str) -> int:
    """One for a small model: its steps are so short that waking a second thread costs more than the work."""
    weights = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    return 1 if 0 < weights < _SMALL_WEIGHTS_BYTES else len(os.sched_getaffinity(0))


def _torch_openmp() -> Path | None:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    package = Path(found.origin).parent
    places = (package / "lib", package.parent / "torch.libs")
    return next((file for place in places for file in sorted(place.glob("libgomp*.so*"))), None)


def _enter_environment(words: dict[str, str]) -> None:
    """Start this program again with `words` set: the loader and OpenMP read theirs only at exec."""
    if os.environ.pop(ENVIRONMENT_MARK, None) is not None:
        return
    environ = os.environ | words | {ENVIRONMENT_MARK: "1"}
    # Without byte code the same imports take twice as long.
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.execve(sys.executable, [sys.executable, "-m", "runtime.engine.server", *sys.argv[1:]], environ)


def _children_die_with_us() -> None:
    """Whatever kills this process, the engine core it forked goes with it."""
    prepared = []

    def before() -> None:
        prepared[:] = [processes.in_child(signal.SIGKILL)]

    os.register_at_fork(before=before, after_in_child=lambda: prepared[0]())


def _parse(words: list[str]) -> Namespace:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(args)
    return args


def _register_model(model: str) -> None:
    """Import the model's class here, so that vLLM does not start a process to look at it."""
    from vllm.model_executor.models.registry import ModelRegistry

    for name in _model_description(model).get("architectures", []):
        if known := ModelRegistry.models.get(name):
            ModelRegistry.register_model(name, known.load_model_cls())


def _install_worker_parts() -> None:
    from runtime.engine import worker

    worker.install()


def _serve(args: Namespace) -> bool:
    """Serve until stopped. True: it was asked to stop; False: the engine core died."""
    import uvloop

    return uvloop.run(_serve_until_stopped(args))


async def _serve_until_stopped(args: Namespace) -> bool:
    """The body of vLLM's own `run_server`, with the engine core forked."""
    from vllm.entrypoints.launchers.api_server.entry import build_and_serve
    from vllm.entrypoints.launchers.launcher import setup_server
    from vllm.v1.engine.async_llm import AsyncLLM

    class Engine(AsyncLLM):
        stopping = False

        def shutdown(self, timeout: float | None = None) -> None:
            self.stopping = True
            super().shutdown(timeout)

    address, sock = setup_server(args, reuse_port=False)
    os.chmod(args.uds, 0o600)
    kind = _passing_instants(Engine) if failpoints.armed() else Engine
    engine = kind.from_vllm_config(_configure(args), disable_log_stats=args.disable_log_stats)
    try:
        ended = await build_and_serve(engine, address, sock, args, timeout_graceful_shutdown=_ENDING_SECONDS)
        asked = engine.stopping
    finally:
        engine.shutdown(timeout=0)
    try:
        await ended
    finally:
        sock.close()
    return asked


def _passing_instants(engine: type[Any]) -> type[Any]:
    """The engine with the instants of an answer in it: only where one is armed, for this is the hot path."""

    class Watched(engine):
        async def generate(self, *args: Any, **settings: Any) -> AsyncIterator[Any]:
            failpoints.passing("engine.accepted")
            async for output in super().generate(*args, **settings):
                failpoints.passing("engine.streaming")
                yield output
            failpoints.passing("engine.answering")

    return Watched


def _configure(args: Namespace) -> VllmConfig:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    engine_args = AsyncEngineArgs.from_cli_args(args)
    vllm_config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # the CPU platform has just asked for spawn
    return vllm_config


def _finish(well: bool) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if well else 1)


if __name__ == "__main__":
    main()
