"""Puts the best adapter into a folder of the user's, as PEFT writes it, once it is at home.

Checkpoints come home by themselves while the run lives (`results/durable`); this waits for the best one and
copies its adapter. Neighbour: `optimizer.py`. Knows nothing of how they come.
"""

from __future__ import annotations

import shutil
import time
import uuid
from pathlib import Path

from launcher.client.arbor.stderr_log import log

# A rented machine's copies leave the line to its rollouts, so the last one may take a while.
_TIMEOUT_SECONDS = 600.0
_POLL_SECONDS = 0.2


def copy_best_adapter(
    folder: Path, checkpoint: str | None, run_dir: Path | None, seconds: float = _TIMEOUT_SECONDS
) -> bool:
    """Copy the adapter and log it; if it cannot be had, log where it will be. Returns whether it is there
    now."""
    if checkpoint is None:
        log(f"{folder} gets no adapter: no step was better than the model before the training")
        return False
    if run_dir is None:
        log(f"{folder} gets no adapter: LAUNCH_RUN_DIR is not set, so the run's folder is not known here")
        return False
    deadline = time.monotonic() + seconds
    while (problem := _try_copy(run_dir / "durable" / checkpoint / "adapter", folder)) is not None:
        if time.monotonic() > deadline:
            log(f"{folder} has no adapter yet: {problem}. When the run has ended it is in {run_dir / 'best'}")
            return False
        time.sleep(_POLL_SECONDS)
    log(f"the best adapter ({checkpoint}) is in {folder}")
    return True


def _try_copy(adapter: Path, folder: Path) -> str | None:
    """None when it is in the folder, whole; else why not. A checkpoint at home is whole from the first."""
    aside = folder.parent / f".{folder.name}-{uuid.uuid4().hex[:8]}"
    try:
        if not adapter.is_dir():
            return f"{adapter} is not there"
        shutil.copytree(adapter, aside)
        folder.mkdir(parents=True, exist_ok=True)
        for file in aside.iterdir():
            file.replace(folder / file.name)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return None
