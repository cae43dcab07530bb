"""launcher/machines/startup.py: how long a runtime may take to become ready."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.machines.startup import LEAST_START_SECONDS, start_seconds
from runtime.__main__ import children
from runtime.schema import RuntimeConfig


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
    assert start_seconds(str(tmp_path)) > LEAST_START_SECONDS + 1000


def test_g23_who_loads_a_model_has_as_long_as_the_launcher_waits(tmp_path: Path) -> None:
    config = RuntimeConfig(
        run_id="r", model_path="m", state_dir=str(tmp_path), socket_dir=str(tmp_path), start_seconds=7200
    )
    bounds = {spec.name: spec.start_seconds for spec in children(tmp_path / "runtime.json", config, b"token")}
    assert bounds["engine-0"] == bounds["trainer"] == 7200 > bounds["gateway"]
