"""Checks a model on the Hugging Face hub before a run: whether it exists, may be downloaded, and can be
served.

Neighbours: `preflight.py` asks; the runtime downloads (`runtime/trainer/policy.py`). Two small answers
are fetched; a model that was downloaded before is looked at on the disk, without the network.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.base import disk
from launcher.base.errors import PreflightError
from launcher.base.log import REDACTOR
from launcher.models import known_models, model_folder

_ANSWER_SECONDS = 8.0
# A plan can do without.
_SIZE_SECONDS = 3.0
_MAX_BYTES = 10_000_000


def check(model: str, environ: Mapping[str, str], token: str | None, *, here: bool = True) -> None:
    """Raises PreflightError if the runtime could not download or use the model.

    `here`: it would be downloaded to this computer, not to a rented one.
    """
    if check_downloaded(model, environ):
        return
    token = token or _login(environ)
    if not _is_online(environ):
        raise PreflightError(
            f"the model {model} is not on this computer",
            "HF_HUB_OFFLINE is set, so launch does not download it",
            "unset HF_HUB_OFFLINE  # or --model FOLDER",
        )
    _check_content(model, _fetch(model, environ, token))
    if here:
        _check_space(model, environ, token)


def check_downloaded(model: str, environ: Mapping[str, str]) -> bool:
    """Whether it was downloaded before. Raises PreflightError if it was, and cannot be used."""
    config = _cached_config(model, environ)
    if config is not None:
        _check_content(model, config.read_bytes())
    return config is not None


def check_config(model: str, config: dict[str, Any]) -> None:
    """Check a config.json of the hub's. Raises PreflightError if the model cannot be used."""
    try:
        model_folder.check_config(config)
    except model_folder.UnusableModelError as unusable:
        raise model_folder.unusable_model(model, unusable, "launch --model FOLDER") from None


def _check_content(model: str, content: bytes) -> None:
    try:
        described = json.loads(content)
    except ValueError:
        why = "its config.json is not JSON"
        raise PreflightError(f"the model {model} cannot be used", why, "launch --model FOLDER") from None
    check_config(model, described if isinstance(described, dict) else {})


def config_of(model: str, environ: Mapping[str, str], token: str | None) -> dict[str, Any] | None:
    """A model's config.json, as `check` reads it; None if it cannot be had."""
    try:
        cached = _cached_config(model, environ)
        if cached is None and not _is_online(environ):
            return None
        content = cached.read_bytes() if cached else _fetch(model, environ, token or _login(environ))
        described = json.loads(content)
    except (PreflightError, OSError, ValueError):
        return None
    return described if isinstance(described, dict) else None


def downloaded_config(model: str, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """The config.json of a model that was downloaded before; None if none was, or it is damaged."""
    cached = _cached_config(model, environ)
    try:
        described = None if cached is None else json.loads(cached.read_bytes())
    except (OSError, ValueError):
        return None
    return described if isinstance(described, dict) else None


def _cached_config(model: str, environ: Mapping[str, str]) -> Path | None:
    """The newest downloaded config.json, in the cache the hub's own library uses."""
    folder = _cache(environ) / f"models--{model.replace('/', '--')}" / "snapshots"
    found = sorted(folder.glob("*/config.json"), key=lambda path: path.lstat().st_mtime)
    return found[-1] if found else None


def _cache(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("HF_HUB_CACHE") or _home(environ) / "hub").expanduser()


def _home(environ: Mapping[str, str]) -> Path:
    caches = Path(environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(environ.get("HF_HOME") or caches / "huggingface").expanduser()


def _login(environ: Mapping[str, str]) -> str | None:
    """The token that `hf auth login` left, which the runtime finds as well."""
    try:
        token = Path(environ.get("HF_TOKEN_PATH") or _home(environ) / "token").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    REDACTOR.hide([token])
    return token or None


def _check_space(model: str, environ: Mapping[str, str], token: str | None) -> None:
    """Check that the download fits on the disk; not checked if the hub does not tell its size."""
    sizes = _sizes(model, environ, token)
    needed = sum(size for name, size in sizes.items() if _is_downloaded(name))
    free = disk.free_bytes(_cache(environ))
    if free < needed:
        raise PreflightError(
            f"the model {model} needs {disk.format_bytes(needed)} of disk",
            f"{disk.format_bytes(free)} are free at {_cache(environ)}",
            "free some space, or set HF_HOME to a folder on a larger disk",
        )


def weights_bytes(model: str, environ: Mapping[str, str], token: str | None) -> int | None:
    """The size of a model's weights by the hub's own list; None if it cannot be asked, or has no such
    model."""
    if not _is_online(environ):
        return None
    sizes = _sizes(model, environ, token or _login(environ), _SIZE_SECONDS)
    return sum_weights(sizes) or None


def sum_weights(sizes: Mapping[str, int]) -> int:
    """The size of the files of a model that are loaded: some have the same weights in another form beside."""
    weights = {
        name: size for name, size in sizes.items() if name.endswith(".safetensors") and "/" not in name
    }
    loaded = {name: size for name, size in weights.items() if name.startswith("model")}
    return sum((loaded or weights).values())


def _sizes(
    model: str, environ: Mapping[str, str], token: str | None, bound_seconds: float = _ANSWER_SECONDS
) -> dict[str, int]:
    """The files of a model on the hub and their sizes; empty if the hub does not tell."""
    url = f"{_endpoint(environ)}/api/models/{urllib.parse.quote(model)}?blobs=true"
    try:
        described = json.loads(_get(url, token, bound_seconds))
        return {file["rfilename"]: int(file["size"]) for file in described["siblings"]}
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return {}


def _is_online(environ: Mapping[str, str]) -> bool:
    return environ.get("HF_HUB_OFFLINE", "").lower() not in {"1", "true", "yes", "on"}


def _is_downloaded(name: str) -> bool:
    """Whether every file that the runtime fetches of a model is there (`runtime/trainer/policy.py`)."""
    return name.endswith((".json", ".safetensors", ".txt", ".jinja"))


def _endpoint(environ: Mapping[str, str]) -> str:
    return (environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _get(url: str, token: str | None, bound_seconds: float = _ANSWER_SECONDS) -> bytes:
    request = urllib.request.Request(url)
    if token:
        # Unredirected: the file itself may lie on another host, which is not to have the token.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=bound_seconds) as answer:
        return answer.read(_MAX_BYTES)


def _fetch(model: str, environ: Mapping[str, str], token: str | None) -> bytes:
    endpoint = _endpoint(environ)
    try:
        return _get(f"{endpoint}/{urllib.parse.quote(model)}/resolve/main/config.json", token)
    except urllib.error.HTTPError as error:
        raise _refused(model, endpoint, error.code, token) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise PreflightError(
            f"the model {model} is not on this computer and cannot be looked up",
            f"{endpoint}: {reason}",
            "connect to the network, or --model FOLDER",
        ) from None


def _refused(model: str, endpoint: str, status: int, token: str | None) -> PreflightError:
    if status in (401, 403):
        # The hub also answers 401 for a model that does not exist, unless it knows the user.
        why = "it does not exist, or it is gated and HF_TOKEN is not set"
        why = "it is gated, and the HF_TOKEN account has no access" if token else why
        return PreflightError(f"the model {model} cannot be downloaded", *_not_found(model, why, endpoint))
    if status == 404:
        why = f"{endpoint} has no such model, or it has no config.json"
        return PreflightError(f"no model {model}", *_not_found(model, why, endpoint))
    why = f"{endpoint} answered {status}"
    return PreflightError(f"the model {model} cannot be looked up", why, "try again, or --model FOLDER")


def _not_found(model: str, why: str, endpoint: str) -> tuple[str, str]:
    """The reason there is none and the remedy: the name that was probably meant, if it is a known one."""
    meant = known_models.closest_model(model)
    if meant is None:
        return why, f"look at {endpoint}/{model}"
    return f"{why}; did you mean {meant}?", f"launch --model {meant}"
