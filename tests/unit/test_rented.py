"""launcher/run/rented_run.py: what a run is told and how long it waits because its machine is rented."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from launcher.config.runtime_config import build
from launcher.console.output import Output
from launcher.run.rented_run import SHARED_FRACTION, announce, runtime_overrides
from launcher.types.machine import Machine
from launcher.types.plan import Plan, RentedGpus

FOUR = RentedGpus("H100:4", ("aws",), 10, None, train_gpus=1, infer_gpus=3)
ONE = replace(FOUR, gpus="H100:1", train_gpus=1, infer_gpus=1)


class _Standing:
    """What `announce` asks of a machine."""

    price_per_hour = 27.52

    def describe(self) -> dict[str, Any]:
        return {"standing": {"where": "AWS/us-east-1", "instance_type": "p5.24xlarge"}}


def test_a_users_ssh_configuration_that_cannot_be_written_costs_no_paid_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").write_text("a file where the folder would be")
    stderr = io.StringIO()
    output = Output(as_json=False, stdout=io.StringIO(), stderr=stderr, environ={})
    plan = Plan("4×H100 on aws", "tiny", 27.52, None, 900.0, None, FOUR)
    (tmp_path / "runs").mkdir()
    machine = cast("Machine", _Standing())
    assert announce(output, machine, plan, "demo", tmp_path / "runs", yes=True) == 27.52
    assert "plain ssh will not find it" in stderr.getvalue() and "launch ssh demo" in stderr.getvalue()


def test_engine_and_trainer_leave_each_other_room_on_a_gpu_they_share() -> None:
    places = {"run_id": "r", "model_path": "m", "device": "cuda", "state_dir": "s", "socket_dir": "d"}
    alone = build(runtime_overrides(FOUR), **places)
    assert (alone.engines, alone.train_processes, alone.dtype) == (3, 1, "bfloat16")
    assert alone.engine.memory_fraction is None
    shared = build(runtime_overrides(ONE), **places)
    assert shared.engine.memory_fraction == SHARED_FRACTION <= 0.5
    asked = build(runtime_overrides(ONE) | {"engine.memory_fraction": 0.3}, **places)
    assert asked.engine.memory_fraction == 0.3
