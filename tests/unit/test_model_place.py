"""launcher/backends/ssh/model_upload.py: where a run's model is on a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

import runtime
from launcher.backends.ssh.model_upload import remote_path

TINY = Path(runtime.__file__).parent / "tiny" / "model"


@pytest.mark.parametrize(
    ("model", "there"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        (str(TINY), "/home/me/slipway-code/runtime/tiny/model"),
        ("/data/my models/qwen 7b; rm", "/home/me/slipway-models/qwen-7b--rm"),
    ],
)
def test_a_model_has_one_place_on_a_machine(model: str, there: str) -> None:
    assert remote_path(model, "/home/me") == there
