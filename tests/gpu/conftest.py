"""What the GPU's tests share: the card by name, and models of real widths with random weights.

The tests run in the runtime's CUDA build (`tests/support/lanes.py`); the launcher's pytest reads this file as
well, and has no torch.
"""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def card() -> dict[str, Any]:
    """What goes beside every figure: which GPU, driver and torch it was."""
    import torch

    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    return {"gpu": torch.cuda.get_device_name(), "driver": driver, "torch": torch.__version__}


@pytest.fixture(scope="session")
def trained_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-0.6B's shape with its whole vocabulary: what is trained, and no engine."""
    from tests.gpu import models

    return models.qwen3(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2.5-1.5B's widths over the embedded model's tokenizer: what an engine serves."""
    from tests.gpu import models

    return models.qwen2(tmp_path_factory.mktemp("served"))


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Each test measures its own memory, and compiles its own kernels."""
    import torch

    yield
    gc.collect()
    torch.cuda.empty_cache()
    torch.compiler.reset()
