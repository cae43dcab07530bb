"""The command line and environment of one vLLM server.

Neighbours: server.py starts vLLM with them; engine_client.py uses the names and the mode defined here. Knows
the adapter's size and the number of loaded versions; nothing of training. Imports no vLLM: the gateway
imports this.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from runtime.engine.parsers import Parsers, select_parsers
from runtime.shared.architectures import check_dtype_on_cpu, check_on_cpu, checked_context
from runtime.shared.language_model import is_multimodal, language_model
from runtime.shared.memory.engine import PROBE_PLACES, cache_bytes
from runtime.shared.model_shape import shape
from runtime.shared.peft_format import engine_rank
from runtime.shared.projections import lora_targets
from runtime.shared.runtime_config import RuntimeConfig

LOGPROBS_MODE = "processed_logprobs"
BASE_NAME = "base"
# Probes of a publication go before rollouts (0), and find a place beside a full batch (PROBE_PLACES).
SCORING_PRIORITY = -1
# How long the engine leaves an idle connection open; vLLM's own 5 s are about as long as a training step.
KEEP_ALIVE_SECONDS = 600
WORKER_MODULE = "runtime.engine.worker"
WORKER_EXTENSION = f"{WORKER_MODULE}.WorkerExtension"
# The name of norms.py's kernels among vLLM's.
NORMS_PROVIDER = "slipway"

_EXECUTOR = f"{WORKER_MODULE}.Executor"
_NORMS = ("rms_norm", "fused_add_rms_norm")
# vLLM starts only where its cache holds one sequence of full length: a model's own 128k would not fit here.
_MAX_CONTEXT = {"cpu": 8192, "cuda": 32768}
_SMALL_WEIGHTS_BYTES = 100 * 2**20
# How many sequences a CPU engine samples at a time. On a GPU vLLM knows better, by the GPU: 1024 on an H100.
_CPU_SEQUENCES = 64
# vLLM's own default for a server on a small GPU; on a large one it is more.
_MIN_GPU_SEQUENCES = 256
_CPU_CACHE_GIB = 1.0
# The prefix cache finds common beginnings of prompts by whole blocks. By default vLLM takes 128 tokens on a
# CPU, and finds nothing in prompts of 140 tokens that differ at their ends; its kernels take multiples of 32.
_CPU_BLOCK_TOKENS = 32


def socket_path(config: RuntimeConfig, index: int) -> Path:
    """The socket of engine `index`."""
    return Path(config.socket_dir) / f"engine-{index}.sock"


def arguments(config: RuntimeConfig, index: int) -> list[str]:
    """vLLM's command line for engine `index`. Raises PolicyError for a model that it cannot serve."""
    if config.device == "cpu":
        check_on_cpu(_language_model(config.model_path))
        check_dtype_on_cpu(_language_model(config.model_path), config.dtype)
    engine = config.engine
    words = ["--model", config.model_path, "--served-model-name", BASE_NAME]
    words += ["--uds", str(socket_path(config, index))]
    words += ["--dtype", config.dtype, "--logprobs-mode", LOGPROBS_MODE, "--enable-prefix-caching"]
    if places := _max_num_seqs(config):
        words += ["--max-num-seqs", str(places)]
    words += ["--scheduling-policy", "priority"]
    words += ["--max-model-len", str(context_length(config))]
    words += ["--enable-lora", "--max-lora-rank", str(engine_rank(config.train.lora.rank))]
    words += ["--lora-target-modules", *_lora_modules(config)]
    # The served version, those rollouts may still be on, and the one being staged (C35).
    slots = max(engine.max_loras, config.max_staleness + 2)
    words += ["--max-loras", str(slots), "--max-cpu-loras", str(4 * slots)]
    words += ["--worker-extension-cls", WORKER_EXTENSION, "--distributed-executor-backend", _EXECUTOR]
    # The model's own top-p and penalties would change the support (C9).
    words += ["--generation-config", "vllm"]
    words += ["--disable-uvicorn-access-log"]
    if is_multimodal(model_description(config.model_path)):
        # Some are published in their makers' own format beside Hugging Face's.
        words += ["--language-model-only", "--config-format", "hf"]
    # A chat request's prompt in ids, without an answer: by that later turns go on from earlier ones.
    words += ["--enable-scale-out", "--enable-tokenizer-info-endpoint"]
    # By default vLLM takes the backend of the first grammar, and later grammars that need another one fail.
    words += ["--structured-outputs-config", json.dumps({"backend": "xgrammar"})]
    parsers = model_parsers(config.model_path)
    if parsers.tool_calls == "mistral":
        # Beside a tokenizer in Mistral's own format vLLM would take that, with grammars of its own for chats.
        words += ["--tokenizer-mode", "hf"]
    if parsers.tool_calls:
        words += ["--enable-auto-tool-choice", "--tool-call-parser", parsers.tool_calls]
    if parsers.reasoning:
        words += ["--reasoning-parser", parsers.reasoning]
    if config.device == "cpu":
        words += ["--enforce-eager", "--kv-cache-memory-bytes", str(_kv_cache_bytes(config))]
        words += ["--block-size", str(_CPU_BLOCK_TOKENS)]
        words += ["--ir-op-priority", json.dumps({norm: [NORMS_PROVIDER] for norm in _NORMS})]
        # Of the memory node, and checked at start even if the cache's size is given.
        words += ["--gpu-memory-utilization", str(engine.memory_fraction or 0.1)]
    else:
        words += ["--gpu-memory-utilization", str(engine.memory_fraction or 0.9)]
        if engine.kv_cache_gib:
            # By default vLLM counts memory as its own that a trainer on the same GPU allocates meanwhile.
            words += ["--kv-cache-memory-bytes", str(int(engine.kv_cache_gib * 2**30))]
    return words


def scratch_path(config: RuntimeConfig, index: int) -> Path:
    """The folder for vLLM's own sockets and rendezvous files. vLLM leaves them behind, so the folder is
    removed with it."""
    return Path(config.socket_dir) / f"e{index}"


def environment(config: RuntimeConfig, index: int) -> dict[str, str]:
    """The environment variables for vLLM and torch, beyond those of this process."""
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


def context_length(config: RuntimeConfig) -> int:
    """The longest sequence in tokens: the configured length, else the model's own context, capped by device.

    Raises PolicyError if the configured length exceeds the model's.
    """
    configured = config.engine.max_model_len
    longest = checked_context(_language_model(config.model_path), configured)
    cap = _MAX_CONTEXT[config.device]
    return configured or min(longest or cap, cap)


def _language_model(model: str) -> dict[str, Any]:
    return language_model(model_description(model))


def max_sequences_of_programs(config: RuntimeConfig) -> int:
    """How many sequences of programs an engine samples at a time, at least."""
    return config.engine.max_num_seqs or (_CPU_SEQUENCES if config.device == "cpu" else _MIN_GPU_SEQUENCES)


def _max_num_seqs(config: RuntimeConfig) -> int | None:
    """How many sequences an engine takes at a time, the probes' own places with them; None: vLLM decides."""
    given = config.engine.max_num_seqs or (_CPU_SEQUENCES if config.device == "cpu" else None)
    return given and given + PROBE_PLACES


def _lora_modules(config: RuntimeConfig) -> tuple[str, ...]:
    """The projections of the blocks alone (C14).

    By default vLLM wraps head and embeddings of a Llama as well, and then its CPU engine crashes at the first
    request for prompt logprobs: a publication's probe.
    """
    return lora_targets(_language_model(config.model_path), config.train.lora.target_modules)


def _kv_cache_bytes(config: RuntimeConfig) -> int:
    """The configured size, but no more than two full batches of the longest sequences could ever fill."""
    configured = int((config.engine.kv_cache_gib or _CPU_CACHE_GIB) * 2**30)
    known, places = shape(_language_model(config.model_path)), _max_num_seqs(config)
    if known is None or places is None:
        return configured
    one = cache_bytes(known, context_length(config), 4 if config.dtype == "float32" else 2)
    return min(configured, 2 * places * one)


def model_parsers(model: str) -> Parsers:
    """vLLM's parsers of this model's tool calls and thoughts."""
    tokenizer = _text(model, "tokenizer.json")
    return select_parsers(
        _chat_template(model), lambda token: json.dumps(token, ensure_ascii=False) in tokenizer
    )


def _chat_template(model: str) -> str:
    """The template as transformers finds it: in a file of its own, else in the tokenizer's, which may hold
    several."""
    if alone := _text(model, "chat_template.jinja"):
        return alone
    template = json.loads(_text(model, "tokenizer_config.json") or "{}").get("chat_template") or ""
    return template if isinstance(template, str) else "".join(one["template"] for one in template)


def model_description(model: str) -> dict[str, Any]:
    """The model's config.json."""
    return json.loads(_model_file(model, "config.json").read_text())


def _text(model: str, name: str) -> str:
    """The text of one of the model's files; empty without such a file."""
    try:
        return _model_file(model, name).read_text()
    except FileNotFoundError:
        return ""


def _model_file(model: str, name: str) -> Path:
    """A file of the model, from its folder or the hub. Raises FileNotFoundError if the hub has none."""
    folder = Path(model)
    if folder.is_dir():
        return folder / name
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(model, name))
    except EntryNotFoundError as error:
        raise FileNotFoundError(f"{model} has no {name}") from error


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
