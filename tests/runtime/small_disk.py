"""Commits checkpoints into a small file system until it is full, and says as JSON what is left there then.

Run by test_checkpoint.py as a program, in a mount namespace of its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from safetensors import SafetensorError

from runtime.shared.checkpoint import ADAPTER_WEIGHTS, CheckpointStore

_WEIGHT_BYTES = 20_000


def _commit(store: CheckpointStore, step: int) -> None:
    def write(folder: Path) -> None:
        (folder / ADAPTER_WEIGHTS).parent.mkdir()
        (folder / ADAPTER_WEIGHTS).write_bytes(os.urandom(_WEIGHT_BYTES))

    store.commit(step, step, {"step": step}, write)


def main(folder: Path) -> None:
    store = CheckpointStore(folder / "checkpoints")
    error, step = "", 0
    while not error:
        step += 1
        try:
            _commit(store, step)
        except (OSError, SafetensorError) as refused:
            error = str(refused)
    said = {
        "error": error,
        "names": store.names(),
        "whole": [store.load(name).name for name in store.names()],
        "debris": [path.name for path in store.root.glob(".tmp-*")],
    }
    store.prune(2)
    _commit(store, step)
    print(json.dumps(said | {"after_pruning": store.names()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
