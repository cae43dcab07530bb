"""Finds a model's config.json: in its folder, in the hub's cache, in the package, or on the hub.

Neighbours: `memory_fit.py` plans memory by it, `hub.py` looks at downloads and asks the hub,
`known_models.py` is the table that ships. Reads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.base import embedded_models
from launcher.models import hub, known_models, model_folder
from runtime.shared.language_model import language_model


@dataclass(frozen=True)
class FoundConfig:
    """The language model's config. `table_date`: the day (ISO) of the table that it is from; None if it is
    the model's own file."""

    config: dict[str, Any]
    table_date: str | None = None


def find_config(
    model: str, environ: Mapping[str, str], token: str | None = None, *, asks: bool = True
) -> FoundConfig | None:
    """The config.json of `--model MODEL`, of a multimodal one the language model's; None if it cannot be had.
    `asks`: the hub as well.
    """
    found = _find(model, environ, token, asks)
    return None if found is None else replace(found, config=language_model(found.config))


def _find(model: str, environ: Mapping[str, str], token: str | None, asks: bool) -> FoundConfig | None:
    folder = embedded_models.folder_of(model)
    if folder.is_dir():
        return _of_folder(folder)
    downloaded = hub.downloaded_config(model, environ)
    if downloaded is not None:
        return FoundConfig(downloaded)
    known = known_models.config_of(model)
    if known is not None:
        return FoundConfig(known, known_models.table_date())
    fetched = hub.config_of(model, environ, token) if asks else None
    return None if fetched is None else FoundConfig(fetched)


def _of_folder(folder: Path) -> FoundConfig | None:
    try:
        return FoundConfig(model_folder.read_config(folder / "config.json"))
    except model_folder.UnusableModelError:
        return None
