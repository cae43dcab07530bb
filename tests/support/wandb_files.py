"""What is in the file of an offline Weights & Biases run, which `wandb sync` would send.

python -m tests.support.wandb_files FILE      (with the runtime's Python, which has wandb: as JSON)
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.environment import REPOSITORY, runtime_environ, runtime_python

_BLOCK_BYTES = 32 * 1024
_HEADER_BYTES = 7


def story_at_home(results: Path) -> dict[str, Any]:
    """`story_of` the one offline run of a run's results, for a process without wandb."""
    (file,) = (results / "wandb").glob("offline-run-*/*.wandb")
    done = subprocess.run(
        [runtime_python(), "-m", "tests.support.wandb_files", str(file)],
        cwd=REPOSITORY,
        env=runtime_environ(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def story_of(file: Path) -> dict[str, Any]:
    """What the run is called, its steps, the steps that were validated, and whether it has an end."""
    rows = list(history(file))
    return {
        "name": next((it.display_name for it in records_of(file, "run")), None),
        "steps": [it["train/step"] for it in rows if "train/step" in it],
        "validations": [it["val/step"] for it in rows if "val/score" in it],
        "ended": bool(list(records_of(file, "exit"))),
    }


def records_of(file: Path, kind: str) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    for data in _records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == kind:
            yield getattr(record, kind)


def axes_of(file: Path) -> Iterator[Any]:
    """What is drawn over what."""
    return records_of(file, "metric")


def history(file: Path) -> Iterator[dict[str, Any]]:
    """What was logged, out of the file that `wandb sync` sends."""
    for row in records_of(file, "history"):
        yield {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row.item} | {
            "_step": row.step.num
        }


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


if __name__ == "__main__":
    print(json.dumps(story_of(Path(sys.argv[1]))))
