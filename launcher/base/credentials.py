"""Secrets: read from `.env`, hidden in all output, and handed only to the processes that need them.

Neighbours: `setting_sources.py` merges these values, `backends/local_machine.py` starts the runtime with
`runtime_environ`, `main.py` hides the secrets of the environment before it shows an error. The runtime's
supervisor hands each child its own part (`runtime/__main__.py`).
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launcher.base import proxies
from launcher.base.errors import ConfigError
from launcher.base.log import REDACTOR

# Handed to those of the runtime's processes that need them, shown as set or not set, never with their value.
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "WANDB_ENTITY", "WANDB_BASE_URL")
# A name that marks its value as secret, whichever program the variable is for.
_SECRET_NAME = re.compile(r"(?:^|_)(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:_|$)", re.IGNORECASE)
_READABLE_BY_OTHERS = 0o044

# The variables of the user's environment that a runtime on this computer needs. Everything else, other
# services' keys above all, stays with the user. LAUNCH_* is left out, and so is what describes the launcher's
# own Python.
_FOR_RUNTIME = frozenset(
    {
        "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP",
        "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH", "CC", "CXX", "CFLAGS", "CXXFLAGS",
        "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NETRC",
        "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY",
        "http_proxy", "https_proxy", "all_proxy", "no_proxy",
    }
)  # fmt: skip
_FOR_RUNTIME_PREFIXES = (
    "LC_", "XDG_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_",
    "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "MALLOC_",
    "DNNL_", "ONEDNN_", "TORCH", "PYTORCH_", "TRITON_", "VLLM_", "SLIPWAY_",
)  # fmt: skip
# The hub's settings, for a runtime on another machine too, and those that mean this computer: its cache, and
# whether it is to download anything.
_HUB, _HUB_PREFIX = "HF_ENDPOINT", "HF_HUB_"
_HUB_HERE = frozenset({"HF_HUB_CACHE", "HF_HUB_OFFLINE"})


@dataclass(frozen=True)
class DotEnv:
    """One `.env` file: its variables, and warnings about the file."""

    variables: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def read_dotenv(named: Path | None, folder: Path) -> DotEnv:
    """Read the named file, else `.env` in `folder` if there is one. Its secrets are hidden at once.

    Raises ConfigError for a file that is missing or cannot be read. No line of it is ever shown.
    """
    path = named or folder / ".env"
    shown = str(named) if named else ".env"
    try:
        text = path.read_text(encoding="utf-8")
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if named is None:
            return DotEnv()
        raise ConfigError(f"no file {named}", "named by --env-file", f"ls -l {named}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{shown} cannot be read", "it is not UTF-8 text", f"file {path}") from None
    except OSError as error:
        raise ConfigError(f"{shown} cannot be read", error.strerror, f"ls -ld {path}") from None
    variables = _parse(text, shown, path)
    secrets = [name for name, value in variables.items() if value and is_secret_name(name)]
    REDACTOR.hide(variables[name] for name in secrets)
    if secrets and mode & _READABLE_BY_OTHERS:
        return DotEnv(variables, (f"{shown} holds secrets and other users can read it: chmod 600 {path}",))
    return DotEnv(variables)


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret."""
    return _SECRET_NAME.search(name) is not None


def hide_secrets_of(environ: Mapping[str, str]) -> None:
    """Hide the values of all secrets in `environ`, also those of other programs, and passwords of proxies. A
    path of a key file is no secret."""
    REDACTOR.hide(
        value for name, value in environ.items() if is_secret_name(name) and not value.startswith(("/", "~"))
    )
    for name, value in environ.items():
        if (proxies.is_proxy(name) or name == _HUB) and (user := proxies.user_of(value)):
            REDACTOR.hide([user, user.partition(":")[2]])


def runtime_environ(environ: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """The part of `environ` that a local runtime is started with, and its secrets."""
    kept = {
        name: value
        for name, value in environ.items()
        if name in _FOR_RUNTIME or name.startswith(_FOR_RUNTIME_PREFIXES)
    }
    return kept | dict(secrets)


def rented_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of `environ` that holds on a rented machine as well: the hub's settings and the proxies.

    No folder or address of this computer is in it. A proxy's address may hold a password.
    """
    hub = {
        name: value
        for name, value in environ.items()
        if (name == _HUB and not proxies.is_here(value))
        or (name.startswith(_HUB_PREFIX) and name not in _HUB_HERE and not value.startswith(("/", "~")))
    }
    through = {
        name: value
        for name, value in environ.items()
        if proxies.is_proxy(name) and not proxies.is_here(value)
    }
    found = hub | through | (proxies.no_proxy(environ) if through else {})
    return {name: value for name, value in found.items() if value and "\n" not in value}


def _parse(text: str, shown: str, path: Path) -> dict[str, str]:
    from dotenv import dotenv_values
    from dotenv.parser import parse_stream

    for binding in parse_stream(io.StringIO(text)):
        bare = binding.key is not None and binding.value is None and _is_launch_variable(binding.key)
        if binding.error or bare:
            start = binding.original.string
            line = binding.original.line + _newlines(start[: len(start) - len(start.lstrip())])
            raise ConfigError(
                f"{shown}: line {line} cannot be read",
                "a line must be NAME=value, or a comment that starts with #",
                f"sed -n {line}p {path}",
            )
    values = dotenv_values(stream=io.StringIO(text))
    return {name: value for name, value in values.items() if value is not None}


def _is_launch_variable(name: str) -> bool:
    return name in SECRETS or name.startswith("LAUNCH_")


def _newlines(text: str) -> int:
    return len(re.findall(r"\r\n|\n|\r", text))
