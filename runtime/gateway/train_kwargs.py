"""`POST /slipway/train_kwargs`: compares a program's trainer keywords with this run.

Neighbours: gateway.py mounts it; `runtime/shared/train_kwargs/` has the table. Trains and changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from fastapi import APIRouter

from runtime.shared.language_model import language_model
from runtime.shared.projections import lora_targets
from runtime.shared.runtime_config import RuntimeConfig
from runtime.shared.train_kwargs import RunContext, TrainKwargsRequest, TrainKwargsResponse, read


def train_kwargs_routes(config: RuntimeConfig, context_tokens: Callable[[], int | None]) -> APIRouter:
    """The router. `context_tokens`: the longest sequence that every engine takes; None if unknown."""
    router = APIRouter(prefix="/slipway")

    # Not async: the model's config.json is read from the disk.
    @router.post("/train_kwargs")
    def train_kwargs(body: TrainKwargsRequest) -> TrainKwargsResponse:
        run = RunContext(config, context_tokens(), _layers(config.model_path))
        return read(body.train_kwargs, run, strict=body.strict, steps=body.steps, trainer=body.trainer)

    return router


def _layers(model_path: str) -> tuple[str, ...] | None:
    """The names of the model's layers that LoRA is on by default; None if its config.json is not here."""
    from huggingface_hub import try_to_load_from_cache

    found = Path(model_path) / "config.json"
    if not Path(model_path).is_dir():
        cached = try_to_load_from_cache(model_path, "config.json")
        if not isinstance(cached, str):
            return None
        found = Path(cached)
    try:
        return lora_targets(language_model(json.loads(found.read_text())))
    except (OSError, ValueError):
        return None
