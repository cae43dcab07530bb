"""Weights & Biases for real, offline: each committed step once, whatever was killed and resumed."""

from __future__ import annotations

import json
import multiprocessing
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.shared.metrics import MetricsLog, WandbLog
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

_BLOCK_BYTES = 32 * 1024
_HEADER_BYTES = 7


def line(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "version": step,
        "metrics": {"loss": step / 10},
        "counts": {"trained": 8, "dropped": {"truncated": 1}},
    }


def life(folder: Path, committed: int, steps: list[int], mode: str = "offline") -> None:
    """One life of the trainer's logging, as a process: it resumes from `committed`, then logs `steps`."""
    # wandb names its folders by the second
    wait_until(lambda: not list(folder.glob(f"wandb/offline-run-{time.strftime('%Y%m%d_%H%M%S')}-*")))
    child = multiprocessing.get_context("spawn").Process(target=_log, args=(folder, committed, steps, mode))
    child.start()
    child.join(120)
    assert child.exitcode == 0


def _log(folder: Path, committed: int, steps: list[int], mode: str) -> None:
    metrics = MetricsLog(folder / "metrics.jsonl")
    wandb = WandbLog(mode, "slipway-test", "run-1", folder, {"learning_rate": 1e-3})
    if metrics.resume(line(committed) if committed else None):
        wandb.append(line(committed))
    for step in steps:
        wandb.append(line(step))
        metrics.append(line(step))
    wandb.close()


def test_c43_wandb_has_each_step_once_over_several_lives(tmp_path: Path) -> None:
    life(tmp_path, 0, [1, 2])
    life(tmp_path, 3, [4])  # step 3 was committed, then the end came before it was logged
    life(tmp_path, 4, [5])
    logged = [record for file in sorted(tmp_path.rglob("*.wandb")) for record in history(file)]
    assert sorted(record["_step"] for record in logged) == [1, 2, 3, 4, 5]
    for record in logged:
        step = record["_step"]
        assert record["train/loss"] == pytest.approx(step / 10)
        assert record["policy_version"] == step and record["counts/trained"] == 8
    assert {file.name for file in tmp_path.rglob("*.wandb")} == {"run-run-1.wandb"}


def test_a_service_that_refuses_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    life(tmp_path, 0, [1], mode="online")
    assert "kept offline" in capfd.readouterr().err
    (file,) = tmp_path.rglob("offline-run-*/*.wandb")
    assert [record["_step"] for record in history(file)] == [1]


def history(file: Path) -> Iterator[dict[str, Any]]:
    """What was logged, out of the file that `wandb sync` sends."""
    from wandb.proto import wandb_internal_pb2

    for data in _records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            yield {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            } | {"_step": record.history.step.num}


def _records(data: bytes) -> Iterator[bytes]:
    """LevelDB's log format behind a 7-byte name: fragments under crc32 (4), length (2), kind (1)."""
    at, pieces = _HEADER_BYTES, b""
    while at + _HEADER_BYTES <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _HEADER_BYTES:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        pieces += data[at + _HEADER_BYTES : at + _HEADER_BYTES + size]
        at += _HEADER_BYTES + size
        if kind in (1, 4):  # whole, or the last fragment
            yield pieces
            pieces = b""
