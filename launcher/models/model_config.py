"""A model's config.json, from the nearest place: its folder, this computer, the package, the hub.

Neighbours: `fitting.py` plans memory by it, `hub.py` looks at downloads and asks the hub, `known_models.py`
is the table that ships. Reads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.models import hub, known_models, model_folder
from launcher.types.settings import TINY_MODEL


@dataclass(frozen=True)
class Found:
    """`read_on`: the day (ISO) of the table that it is from; None where it is the model's own file."""

    config: dict[str, Any]
    read_on: str | None = None


def of(
    model: str, environ: Mapping[str, str], token: str | None = None, *, asks: bool = True
) -> Found | None:
    """The config.json of `--model MODEL`; None where it cannot be had. `asks`: the hub as well."""
    folder = model_folder.tiny_folder() if model == TINY_MODEL else Path(model).expanduser()
    if folder.is_dir():
        return _of_folder(folder)
    downloaded = hub.downloaded_config(model, environ)
    if downloaded is not None:
        return Found(downloaded)
    known = known_models.config_of(model)
    if known is not None:
        return Found(known, known_models.read_on())
    asked = hub.config_of(model, environ, token) if asks else None
    return None if asked is None else Found(asked)


def _of_folder(folder: Path) -> Found | None:
    try:
        return Found(model_folder.read_config(folder / "config.json"))
    except model_folder.UnusableError:
        return None
