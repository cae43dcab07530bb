"""launcher/backends/runtime_start.py: how long a runtime may take; a model it refuses."""

from __future__ import annotations

import http.server
import json
import socketserver
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.backends import cloud_machine, local_machine
from launcher.backends.cloud_machine import CloudMachine
from launcher.backends.local_machine import LocalMachine
from launcher.backends.runtime_start import (
    MIN_START_SECONDS,
    RuntimeStart,
    last_lines,
    start_seconds,
)
from launcher.backends.ssh import remote_machine
from launcher.backends.ssh.remote_machine import RemoteMachine
from launcher.base.errors import NotStarted, PreflightError
from runtime.__main__ import children
from runtime.shared.log_errors import final_error
from runtime.shared.runtime_config import RuntimeConfig


@pytest.mark.parametrize(
    ("model", "size", "least_hours", "most_hours"),
    [
        ("/home/me/model", None, 0.5, 0.51),
        ("owner/nothing-said", None, 0.5, 0.51),
        ("Qwen/Qwen2.5-0.5B-Instruct", None, 0.5, 0.6),
        ("Qwen/Qwen2.5-7B-Instruct", None, 0.9, 1.2),
        ("meta-llama/Llama-3.1-70B-Instruct", None, 4.0, 7.0),
        ("owner/nothing-said", 141 * 10**9, 4.0, 7.0),
    ],
)
def test_g23_a_start_is_waited_for_by_the_size_of_what_must_come_first(
    model: str, size: int | None, least_hours: float, most_hours: float
) -> None:
    assert least_hours * 3600 <= start_seconds(model, size) <= most_hours * 3600


def test_g23_of_a_folder_its_files_are_what_counts(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(16 * 10**9)  # sparse: no disk is needed
    assert start_seconds(str(tmp_path)) > MIN_START_SECONDS + 1000


def test_g23_who_loads_a_model_has_as_long_as_the_launcher_waits(tmp_path: Path) -> None:
    config = RuntimeConfig(
        run_id="r", model_path="m", state_dir=str(tmp_path), socket_dir=str(tmp_path), start_seconds=7200
    )
    bounds = {spec.name: spec.start_seconds for spec in children(tmp_path / "runtime.json", config, b"token")}
    assert bounds["engine-0"] == bounds["trainer"] == 7200 > bounds["gateway"]


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For how many seconds a start was waited for."""
    seconds: list[float] = []

    class Waited:
        def __init__(self, *words: Any) -> None:
            """It starts at once."""

        def wait(self, token: str, keeper_code: Any, bound_seconds: float) -> None:
            seconds.append(bound_seconds)

    for place in (local_machine, cloud_machine):
        monkeypatch.setattr(place, "RuntimeStart", Waited)
    return seconds


CONFIG = RuntimeConfig(run_id="r", model_path="m", state_dir="/s", socket_dir="/s", start_seconds=7200)


def test_g23_a_machine_here_waits_for_as_long_as_its_runtime_is_told(
    tmp_path: Path, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = LocalMachine("slip-01234567", tmp_path, tmp_path / "environments")
    monkeypatch.setattr(machine, "_start_keeper", lambda *words: SimpleNamespace(poll=lambda: None))
    machine.serve(CONFIG, "token")
    assert waited == [7200.0]


def test_g23_a_rented_machine_is_waited_for_as_long_as_its_runtime_is_told(
    tmp_path: Path, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stub:
        def __init__(self, *words: Any) -> None:
            self.here = tmp_path

        def __getattr__(self, name: str) -> Any:
            return lambda *words, **more: None

    for name in ("RemoteJob", "Link"):
        monkeypatch.setattr(cloud_machine, name, Stub)
    monkeypatch.setattr(remote_machine, "RemoteFolder", Stub)
    monkeypatch.setattr(RemoteMachine, "user_home", "/home/u")
    monkeypatch.setattr(RemoteMachine, "host", None)
    monkeypatch.setattr(cloud_machine, "make_own_folder", lambda folder, owner: None)
    machine = CloudMachine("slip-01234567", tmp_path, infra=["aws"], gpus="H100:1", idle_minutes=10)
    machine.serve(CONFIG, "token")
    assert waited == [7200.0]


def test_why_an_engine_did_not_start_is_the_error_it_ended_with_not_what_came_after_it(
    tmp_path: Path,
) -> None:
    log = tmp_path / "engine-0.log"
    log.write_text(
        "INFO: loading\nTraceback (most recent call last):\n    raise ValueError(\n"
        "ValueError: No available memory for the cache blocks.\n\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
        + "nanobind: leaked\n"
        * 40
    )
    assert final_error(log)[-2:] == [
        "    raise ValueError(",
        "ValueError: No available memory for the cache blocks.",
    ]
    log.write_text("".join(f"line {number}\n" for number in range(40)))
    assert final_error(log) == last_lines(log) and final_error(log)[-1] == "line 39"
    assert final_error(tmp_path / "nothing") == []


def _of_vllm(process: str, pid: int, *lines: str) -> list[str]:
    return [f"({process} pid={pid}) ERROR 11-27 03:07:13 [core.py:1512] {line}" for line in lines]


def _life(number: int) -> list[str]:
    """An engine's core that dies of its first request, as vLLM 0.32 tells it."""
    dead = "vllm.v1.engine.exceptions.EngineDeadError: see the stack trace (above)"
    return [
        "OSError: [Errno 24] is what a limit of open files may cause",
        *_of_vllm("EngineCore", number, "EngineCore ended.", "Traceback (most recent call):"),
        *_of_vllm("EngineCore", number, f"RuntimeError: Unsupported CPU attention: head_dim={number}"),
        *_of_vllm("EngineCore", number, "RuntimeError: cannot schedule new futures after shutdown"),
        *_of_vllm("MainProcess", 1, "  raise self._format_exception(outputs)", f"{dead} for the root cause."),
        *_of_vllm("MainProcess", 1, "ConnectionResetError: the socket is closed"),
        f"(MainProcess pid=1) INFO 11-27 03:07:13 [client.py:777] [shutdown] MPClient: complete {number}",
    ]


def test_n05_why_an_engine_ended_is_its_cores_first_error_of_its_last_life(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "engine-0.log"
    log.parent.mkdir()
    log.write_text("\n".join([*_life(16), *_life(24)]) + "\n")
    assert final_error(log)[-1].endswith("RuntimeError: Unsupported CPU attention: head_dim=24")
    children = [{"name": "engine-0", "state": "failed", "restarts": 2}]
    (tmp_path / "supervisor.json").write_text(json.dumps({"children": children}))
    start = RuntimeStart("slip-01234567", tmp_path, tmp_path / "no.sock", lambda text: None)
    with pytest.raises(NotStarted) as ended:
        start.wait("token", lambda: None, 60)
    assert ended.value.why == "RuntimeError: Unsupported CPU attention: head_dim=24"
    assert ended.value.hint == "launch logs slip-01234567 --which engine-0"


# ------------------------------------------------------------------ a model that is refused


@contextmanager
def gateway(status: dict[str, Any]) -> Iterator[Path]:
    """A gateway that says this of itself; its socket."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = json.dumps(status).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it
            """Quiet."""

        def address_string(self) -> str:
            return "unix"

    with tempfile.TemporaryDirectory(prefix="slip-") as folder:
        door = Path(folder) / "g.sock"
        with socketserver.ThreadingUnixStreamServer(str(door), Handler) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            yield door
            server.shutdown()


REASON = "engine and trainer disagree on this model: logprobs differ by 3.1 on average under a random adapter"


def test_c58_a_model_that_the_runtime_refuses_ends_the_start_with_the_numbers(tmp_path: Path) -> None:
    found = {"admitted": False, "model": "owner/model", "reason": REASON}
    with gateway({"phase": "failed", "admission": found}) as door:
        start = RuntimeStart("slip-01234567", tmp_path, door, lambda _: None)
        with pytest.raises(PreflightError) as refused:
            start.wait("token", lambda: None, 60)
    error = refused.value
    assert error.exit_code == 3
    assert error.message == "owner/model is refused: it could not be trained as it is served"
    assert error.why == REASON
    assert error.hint == "launch status slip-01234567", "which shows it, with the numbers"


def test_a_trainer_that_refuses_its_model_is_not_possible_here_and_no_program_failed(tmp_path: Path) -> None:
    child = {"name": "trainer", "state": "failed", "restarts": 0}
    (tmp_path / "supervisor.json").write_text(json.dumps({"children": [child]}))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer.log").write_text("PolicyError: cannot train this\n")
    with pytest.raises(NotStarted) as refused:
        RuntimeStart("slip-01234567", tmp_path, tmp_path / "none.sock", lambda _: None).wait(
            "token", lambda: None, 60
        )
    error = refused.value
    assert (error.exit_code, error.message) == (3, "the runtime's trainer did not start")
    assert error.to_dict()["last_lines"] == ["trainer: PolicyError: cannot train this"]
    assert error.hint == "launch logs slip-01234567 --which trainer"


@pytest.mark.parametrize("found", [None, {"admitted": True, "model": "owner/model"}])
def test_a_model_that_is_admitted_and_a_runtime_that_says_nothing_of_it_are_waited_for(
    tmp_path: Path, found: dict[str, Any] | None
) -> None:
    with gateway({"phase": "ready", "admission": found}) as door:
        RuntimeStart("slip-01234567", tmp_path, door, lambda _: None).wait("token", lambda: None, 60)
