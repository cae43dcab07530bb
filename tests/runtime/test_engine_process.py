"""The engine as a process: what it is started with, and what is left when it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from runtime.engine import command
from runtime.gateway.engines.engine_client import EngineClient
from runtime.gateway.engines.version_check import AdapterVerifier
from runtime.gateway.requests.request_fields import check
from runtime.shared import process_table, processes
from runtime.shared.architectures import PolicyError
from runtime.shared.runtime_config import EngineConfig, RuntimeConfig
from runtime.shared.train_config import LoraConfig, TrainConfig
from tests.runtime.adapters import PROJECTIONS, commit, write_adapter
from tests.runtime.conftest import TINY_MODEL, EngineProcess, RunningEngine
from tests.support.at_rest import AtRest
from tests.support.waiting import SOONEST_SECONDS, wait_until, wait_until_async

GONE_SECONDS = 60.0
# Its server imports vLLM before: two minutes were not enough where thirty programs shared two cores.
CORE_SECONDS = 600.0
CPU_RUNNER = "vllm.v1.worker.cpu_model_runner.CPUModelRunner"


def config(**more: object) -> RuntimeConfig:
    told = {"run_id": "t", "model_path": str(TINY_MODEL), "state_dir": "/s", "socket_dir": "/k"}
    return RuntimeConfig.model_validate(told | more)


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_tool_calls_are_parsed_where_the_tokenizer_has_the_parsers_token(tmp_path: Path) -> None:
    """Not every model of Llama's shape is a Llama 3, and vLLM's parser ends the engine without its token."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "chat_template.jinja").write_text("<|start_header_id|> {{ message.tool_calls }}")
    for vocabulary, parser in (({"<|python_tag|>": 1}, "llama3_json"), ({"<s>": 1}, None)):
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
        words = command.arguments(config(model_path=str(tmp_path)), 0)
        assert (option(words, "--tool-call-parser") if "--tool-call-parser" in words else None) == parser
    assert option(command.arguments(config(), 0), "--tool-call-parser") == "hermes"


def test_a_mistral_keeps_the_tokenizer_that_the_trainer_has(tmp_path: Path) -> None:
    """Beside one in Mistral's own format vLLM would take that, and make other grammars of chats."""
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    (tmp_path / "chat_template.jinja").write_text("[AVAILABLE_TOOLS] [TOOL_CALLS]")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"[TOOL_CALLS]": 5}}}))
    words = command.arguments(config(model_path=str(tmp_path)), 0)
    assert (option(words, "--tokenizer-mode"), option(words, "--tool-call-parser")) == ("hf", "mistral")
    assert "--tokenizer-mode" not in command.arguments(config(), 0)


def lora_modules(words: list[str]) -> list[str]:
    first = words.index("--lora-target-modules") + 1
    return list(itertools.takewhile(lambda word: not word.startswith("--"), words[first:]))


def test_c14_engine_neither_head_nor_embeddings_can_have_an_adapter() -> None:
    assert sorted(lora_modules(command.arguments(config(), 0))) == sorted(PROJECTIONS)


@pytest.mark.parametrize(
    ("described", "modules"),
    [
        ({"model_type": "qwen3"}, PROJECTIONS),
        ({"model_type": "phi3"}, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ({"model_type": "qwen3_moe", "num_experts": 4}, ("q_proj", "k_proj", "v_proj", "o_proj")),
        ({"model_type": "gpt_oss", "num_local_experts": 4}, ("q_proj", "k_proj", "v_proj", "o_proj")),
    ],
)
def test_an_engine_has_room_for_adapters_where_the_family_has_them(
    tmp_path: Path, described: dict[str, Any], modules: tuple[str, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert lora_modules(command.arguments(config(model_path=str(tmp_path)), 0)) == list(modules)
    chosen = TrainConfig(lora=LoraConfig(target_modules=("o_proj",)))
    assert lora_modules(command.arguments(config(model_path=str(tmp_path), train=chosen), 0)) == ["o_proj"]


def test_a_gpu_decides_how_many_sequences_it_takes_unless_it_is_told() -> None:
    """vLLM's own default goes by the GPU; where a number is given, a probe finds a place beside as many."""
    told = EngineConfig(max_num_seqs=10)
    assert "--max-num-seqs" not in command.arguments(config(device="cuda"), 0)
    assert option(command.arguments(config(), 0), "--max-num-seqs") == "68"
    for device in ("cpu", "cuda"):
        words = command.arguments(config(device=device, engine=told), 0)
        assert option(words, "--max-num-seqs") == "14"
    at_once = command.max_sequences_of_programs
    assert [at_once(config(device="cuda")), at_once(config()), at_once(config(engine=told))] == [256, 64, 10]


def test_the_engine_serves_the_base_on_its_own_socket() -> None:
    words = command.arguments(config(), 3)
    assert option(words, "--uds") == "/k/engine-3.sock"
    assert option(words, "--served-model-name") == "base"
    assert "--host" not in words and "--port" not in words


def test_c08_the_logprobs_mode_is_pinned_in_the_command_line() -> None:
    for device in ("cpu", "cuda"):
        assert option(command.arguments(config(device=device), 0), "--logprobs-mode") == "processed_logprobs"


def test_r09_a_cpus_prefix_cache_finds_what_short_prompts_share() -> None:
    """By whole blocks: of 128 tokens, as vLLM takes by itself, it finds nothing that is shorter."""
    assert int(option(command.arguments(config(), 0), "--block-size")) == 32
    assert "--block-size" not in command.arguments(config(device="cuda"), 0)


def test_the_context_is_the_models_own_up_to_a_bound(tmp_path: Path) -> None:
    assert option(command.arguments(config(), 0), "--max-model-len") == "1024"
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 131072}))
    assert option(command.arguments(config(model_path=str(tmp_path)), 0), "--max-model-len") == "8192"
    told = config(engine=EngineConfig(max_model_len=512))
    assert option(command.arguments(told, 0), "--max-model-len") == "512"


def test_a_context_past_the_models_own_is_refused_with_both_numbers(tmp_path: Path) -> None:
    told = config(engine=EngineConfig(max_model_len=1025))
    with pytest.raises(PolicyError, match=r"max_model_len is 1025.*1024 tokens"):
        command.arguments(told, 0)


def test_the_context_of_longrope_ends_where_its_rotations_become_others(tmp_path: Path) -> None:
    """Served longer, vLLM rotates by the long factors however short a sequence is; transformers does not."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    described = {"max_position_embeddings": 131072, "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(described))
    for device in ("cpu", "cuda"):
        words = command.arguments(config(model_path=str(tmp_path), device=device), 0)
        assert option(words, "--max-model-len") == "4096"
    longer = EngineConfig(max_model_len=4097)
    with pytest.raises(PolicyError, match="4096 tokens"):
        command.arguments(config(model_path=str(tmp_path), engine=longer), 0)


@pytest.mark.parametrize(("rank", "slots"), [(1, "8"), (16, "16"), (17, "32"), (256, "256")])
def test_slots_are_as_wide_as_the_adapters_need(rank: int, slots: str) -> None:
    told = config(train=TrainConfig(lora=LoraConfig(rank=rank)))
    assert option(command.arguments(told, 0), "--max-lora-rank") == slots


def test_a_model_in_a_folder_is_never_looked_up_on_the_hub() -> None:
    assert command.environment(config(), 0)["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in command.environment(config(model_path="Qwen/Qwen2.5-1.5B-Instruct"), 0)


def test_a_small_model_runs_on_one_thread_and_a_large_one_on_all(tmp_path: Path) -> None:
    assert command.environment(config(), 0)["OMP_NUM_THREADS"] == "1"
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(200 * 2**20)
    threads = command.environment(config(model_path=str(tmp_path)), 0)["OMP_NUM_THREADS"]
    assert threads == str(len(os.sched_getaffinity(0)))


def test_c35_there_is_a_slot_for_every_version_in_use_and_one_to_stage() -> None:
    for staleness, slots in ((0, "4"), (2, "4"), (5, "7")):
        assert option(command.arguments(config(max_staleness=staleness), 0), "--max-loras") == slots


def test_the_cache_is_no_larger_than_it_can_be_filled() -> None:
    told = int(option(command.arguments(config(), 0), "--kv-cache-memory-bytes"))
    token = 2 * 4 * 2 * 32 * 4  # K and V, layers, heads, width, bytes
    assert 64 * 1024 * token < told < 2**30
    small = config(engine=EngineConfig(kv_cache_gib=0.0625))
    assert option(command.arguments(small, 0), "--kv-cache-memory-bytes") == str(2**26)


def test_on_a_gpu_the_cache_is_what_was_planned_or_vllms_own() -> None:
    """What vLLM measures on a GPU that is shared is the trainer's as well."""
    own = command.arguments(config(device="cuda"), 0)
    assert "--kv-cache-memory-bytes" not in own and "--max-num-seqs" not in own
    planned = command.arguments(config(device="cuda", engine=EngineConfig(kv_cache_gib=19.5)), 0)
    assert option(planned, "--kv-cache-memory-bytes") == str(int(19.5 * 2**30))


def test_nothing_is_reported_to_anyone() -> None:
    assert command.environment(config(), 0)["VLLM_NO_USAGE_STATS"] == "1"


def test_g17_an_idle_connection_is_closed_by_the_client_and_never_by_the_engine(tmp_path: Path) -> None:
    """A request on a connection that the engine is just closing is lost."""

    async def idle_seconds() -> float:
        client = EngineClient(tmp_path / "engine.sock")
        connector = client._open().connector
        await client.close()
        assert isinstance(connector, aiohttp.UnixConnector)
        return connector._keepalive_timeout

    kept = int(command.environment(config(), 0)["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"])
    assert 0 < asyncio.run(idle_seconds()) <= kept / 10


@pytest.mark.slow
def test_g12_the_engine_listens_on_loopback_and_its_socket_only(engine: RunningEngine) -> None:
    pids = [engine.pid, *process_table.descendants(engine.pid)]
    assert len(pids) == 2  # the API server and the engine core: nothing else was started
    inodes = {
        os.readlink(link) for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()
    }
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = line.split()[1], line.split()[3], line.split()[9]
            if state == "0A" and f"socket:[{inode}]" in inodes:
                assert local.startswith(("0100007F:", "00000000000000000000000001000000:")), local
    assert stat.S_IMODE(engine.socket.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(engine.socket.stat().st_mode) == 0o600


@pytest.mark.slow
def test_an_idle_engine_wakes_one_thread_for_all_its_process_groups(engine: RunningEngine) -> None:
    (core,) = process_table.descendants(engine.pid)
    names = [(task / "comm").read_text().strip() for task in Path(f"/proc/{core}/task").iterdir()]
    assert names.count("gloo_tcp_loop") == 1, names


@pytest.mark.slow
def test_long_prompts_with_seeds_leave_the_engine_alive(engine: RunningEngine) -> None:
    """vLLM 0.32's CPU engine dies of a seeded prompt that is prefilled in two chunks: `check` drops seeds."""

    salt = secrets.token_hex(8)  # else an engine that has run this before has most of them in its cache

    async def one(client: EngineClient, seed: int) -> int:
        prompt = [3 + (seed * 31 + index) % 700 for index in range(900)]
        body = {"model": "base", "prompt": prompt, "max_tokens": 2, "temperature": 1}
        body |= {"seed": seed, "cache_salt": salt}
        content = json.dumps(check("completion", body, "cpu")).encode()
        async with client.post("/v1/completions", content) as response:
            return response.status

    async def scenario() -> None:
        client = EngineClient(engine.socket)
        (core,) = process_table.children(engine.pid)
        os.kill(core, signal.SIGSTOP)
        try:  # all are waiting when it goes on: whatever they come to, one does not fit into a step
            asked = [asyncio.create_task(one(client, seed)) for seed in range(12)]
            await wait_until_async(AtRest(engine.pid), what="the server to have taken them in")
        finally:
            os.kill(core, signal.SIGCONT)
        assert set(await asyncio.gather(*asked)) == {200}
        assert await client.health()
        await client.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_an_engine_whose_core_was_killed_ends_and_says_so(own_engine: Callable[..., EngineProcess]) -> None:
    engine = own_engine()
    engine.wait_until_ready()
    (core,) = process_table.children(engine.process.pid)
    os.kill(core, signal.SIGKILL)
    assert engine.process.wait(timeout=GONE_SECONDS) == 1


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_the_core_dies_with_the_server_whenever_that_is_killed(
    own_engine: Callable[..., EngineProcess], start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", start)
    engine = own_engine()

    def began() -> int | None:
        assert engine.process.poll() is None, engine.log.read_text(errors="replace")[-4000:]
        return _core(engine)

    core = wait_until(began, CORE_SECONDS, rarest_seconds=SOONEST_SECONDS)  # long before it is ready
    os.kill(core, signal.SIGSTOP)  # so that it cannot end by itself when it misses its server
    engine.process.kill()
    engine.process.wait(timeout=GONE_SECONDS)
    try:
        wait_until(lambda: process_table.read_process(core) is None, GONE_SECONDS)
    finally:
        processes.signal_process(core, signal.SIGKILL)


@pytest.mark.slow
def test_c23_engine_a_spawned_core_proves_what_it_holds_as_a_forked_one(
    own_engine: Callable[..., EngineProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM spawns it once CUDA is initialised: what only its parent has put in place is not there then."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    engine = own_engine()
    adapter = write_adapter(tmp_path / "adapter", TINY_MODEL, seed=7)
    checkpoint = commit(
        tmp_path / "checkpoints", TINY_MODEL, adapter, version=1, sequence=list(range(5, 45)), prompt=16
    )

    async def scenario() -> None:
        client = EngineClient(engine.socket)
        proof = await AdapterVerifier([client], "policy").verify(checkpoint)
        assert (proof.modules, proof.max_error < 2e-4) == (28, True)
        assert [said["model_runner"] for said in await client._rpc("sampling")] == [CPU_RUNNER]
        await client.close()

    engine.wait_until_ready()
    core = _core(engine)
    assert core is not None and _stack(core) != _stack(engine.process.pid), "it is a fork after all"
    asyncio.run(scenario())
    names = [(task / "comm").read_text().strip() for task in Path(f"/proc/{core}/task").iterdir()]
    assert names.count("gloo_tcp_loop") == 1, names
    assert f"model runner: {CPU_RUNNER}" in engine.log.read_text()


@pytest.mark.slow
def test_an_engine_asked_to_stop_ends_well_and_leaves_nothing(
    own_engine: Callable[..., EngineProcess],
) -> None:
    engine = own_engine()
    engine.wait_until_ready()
    below = process_table.descendants(engine.process.pid)
    scratch = engine.socket.parent / "e0"
    assert any(scratch.iterdir())
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(timeout=GONE_SECONDS) == 0
    wait_until(lambda: not any(process_table.read_process(pid) for pid in below), GONE_SECONDS)
    assert not scratch.exists()


def _stack(pid: int) -> str:
    """Where a process has its stack: a fork where its parent has it, another program somewhere else."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return next(line.split()[0] for line in lines if line.endswith("[stack]"))


def _core(engine: EngineProcess) -> int | None:
    """The child that has given itself the name of vLLM's core: forked, and past its first instructions."""
    for pid in process_table.children(engine.process.pid):
        with contextlib.suppress(OSError):  # vLLM starts others, for a moment
            if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return None
