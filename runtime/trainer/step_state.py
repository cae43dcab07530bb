"""A checkpoint's `state.json`, which is also the source of its line in `metrics.jsonl`.

Neighbours: the recipe commits it; the gateway reads it after a restart, and the program its `client_state`.
Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.shared.batch import Batch
from runtime.trainer.update import StepResult


def state_of(batch: Batch, folder: str, trained: StepResult, counters: Mapping[str, int]) -> dict[str, Any]:
    """`folder`: the batch's folder; `counters`: sums over the run, this step in them."""
    empty = {f"empty_{name}": float(count) for name, count in batch.empty_before.items() if count}
    return {
        "schema": 1,
        "step": batch.step,
        "version": batch.step,
        "kind": batch.kind,
        "batch": folder,
        "key": batch.meta.get("key"),
        "request_sha256": batch.meta.get("request_sha256"),
        "client_state": batch.meta.get("client_state"),
        "settings": dict(trained.settings),
        "metrics": trained.metrics | empty,
        "counts": trained.counts,
        "counters": dict(counters),
    }
