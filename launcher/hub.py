"""Looks at a model on the Hugging Face hub before a run begins: is it there, may we, can we serve it.

Neighbours: `preflight.py` asks; the runtime downloads (`runtime/training/policy.py`). One small file is
fetched; a model that was downloaded before is looked at on the disk, without the network.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from launcher import model_folder
from launcher.errors import PreflightError
from launcher.log import REDACTOR

_ANSWER_SECONDS = 8.0
_CONFIG_BYTES = 10_000_000


def check(model: str, environ: Mapping[str, str], token: str | None) -> None:
    """Raises PreflightError when the runtime could not have or use the model."""
    config = _cached_config(model, environ)
    if config is not None:
        content = config.read_bytes()
    elif environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        raise PreflightError(
            f"the model {model} is not on this computer",
            "HF_HUB_OFFLINE is set, so it is not downloaded",
            "env -u HF_HUB_OFFLINE launch …, or --model FOLDER",
        )
    else:
        content = _fetch(model, environ, token or _login(environ))
    try:
        described = json.loads(content)
        model_folder.check_config(described if isinstance(described, dict) else {})
    except ValueError:
        why = "its config.json is no JSON"
        raise PreflightError(f"the model {model} cannot be used", why, "launch --model FOLDER") from None
    except model_folder.UnusableError as unusable:
        raise model_folder.unusable_model(model, unusable, "launch --model FOLDER") from None


def _cached_config(model: str, environ: Mapping[str, str]) -> Path | None:
    """The newest downloaded config.json, in the cache the hub's own library uses."""
    cache = Path(environ.get("HF_HUB_CACHE") or _home(environ) / "hub").expanduser()
    folder = cache / f"models--{model.replace('/', '--')}" / "snapshots"
    found = sorted(folder.glob("*/config.json"), key=lambda path: path.lstat().st_mtime)
    return found[-1] if found else None


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


def _fetch(model: str, environ: Mapping[str, str], token: str | None) -> bytes:
    endpoint = (environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    request = urllib.request.Request(f"{endpoint}/{model}/resolve/main/config.json")
    if token:
        # Unredirected: the file itself may lie on another host, which is not to have the token.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
            return answer.read(_CONFIG_BYTES)
    except urllib.error.HTTPError as error:
        raise _refused(model, endpoint, error.code, token) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise PreflightError(
            f"the model {model} is not on this computer and cannot be looked up",
            f"{endpoint}: {reason}",
            "connect to the network, or --model FOLDER",
        ) from None


def _refused(model: str, endpoint: str, status: int, token: str | None) -> PreflightError:
    if status in (401, 403):
        # The hub answers 401 for what does not exist, too, unless it knows who asks.
        why = "it does not exist, or it is gated and HF_TOKEN is not set"
        why = "it is gated, and the account of HF_TOKEN has no access" if token else why
        return PreflightError(f"the model {model} cannot be downloaded", why, f"look at {endpoint}/{model}")
    if status == 404:
        why = f"{endpoint} has no such model, or it has no config.json"
        return PreflightError(f"no model {model}", why, f"look at {endpoint}/{model}")
    why = f"{endpoint} answered {status}"
    return PreflightError(f"the model {model} cannot be looked up", why, "try again, or --model FOLDER")
