"""Credentials that are no keys in a file: programs that print them, and plugins for the user's own clusters.

They look below the user's home, and in a run's private home they would find nothing. Neighbours:
`sky_home.py` makes that home with these. Reads configurations, and copies no secret.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# In the private home; the user's own with the programs' lines changed.
AWS_CONFIG = "aws-config"
_AWS_CONFIG_FILE = "AWS_CONFIG_FILE"
_PROGRAM = re.compile(r"^(\s*credential_process\s*=\s*)(\S.*)$", re.M)
_SECRET = re.compile(r"^\s*aws_(secret_access_key|session_token)\s*=", re.M)
# By the plugin's program: whose credentials it takes.
_PLUGINS = {
    "aws": "aws", "aws-iam-authenticator": "aws", "aws-vault": "aws",
    "gke-gcloud-auth-plugin": "gcp", "gcloud": "gcp",
    "kubelogin": "azure", "az": "azure",
}  # fmt: skip
# Clouds whose credentials can stay in the user's own folder, named by a variable: no other process sees them
# (G16).
_CREDENTIAL_VARIABLES = {
    "gcp": ("CLOUDSDK_CONFIG", ".config/gcloud"),
    "azure": ("AZURE_CONFIG_DIR", ".azure"),
}


def aws_config_with_user_home(user_home: Path, environ: Mapping[str, str]) -> str | None:
    """The user's AWS configuration for a home that is not the user's: each `credential_process` is started
    with the user's own HOME, where its files are. None if there is no such program, or if the file has keys
    as well, because keys are not copied.
    """
    path = Path(_expanded(environ.get(_AWS_CONFIG_FILE) or "~/.aws/config", user_home))
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError):
        return None
    if not _PROGRAM.search(text) or _SECRET.search(text):
        return None
    own = f"env HOME={shlex.quote(str(user_home))}"
    return _PROGRAM.sub(lambda line: f"{line[1]}{own} {line[2]}", text)


def clouds_of_kubeconfig(user_home: Path, environ: Mapping[str, str]) -> set[str]:
    """The clouds whose programs the user's kubeconfig starts: EKS, GKE and AKS let in by them."""
    found: set[str] = set()
    for name in (environ.get("KUBECONFIG") or "~/.kube/config").split(os.pathsep):
        path = Path(_expanded(name, user_home))
        found |= _plugins_of(path) if name else set()
    return found


def credential_variables(clouds: set[str], user_home: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that tell such plugins where the user's own credentials are."""
    told = [_CREDENTIAL_VARIABLES[cloud] for cloud in clouds if cloud in _CREDENTIAL_VARIABLES]
    return {name: environ.get(name) or str(user_home / place) for name, place in told}


def expand_user(value: str, user_home: Path) -> str:
    """A variable's value, or several paths in one, as the user's own shell would read it."""
    return os.pathsep.join(_expanded(part, user_home) for part in value.split(os.pathsep))


def _expanded(path: str, user_home: Path) -> str:
    return str(user_home / path[2:]) if path.startswith("~/") else path


def _plugins_of(path: Path) -> set[str]:
    import yaml  # comes with SkyPilot

    found: Any = None
    with contextlib.suppress(OSError, UnicodeDecodeError, yaml.YAMLError):
        found = yaml.safe_load(path.read_text())
    users = found.get("users") if isinstance(found, dict) else None
    commands: list[str] = []
    for one in users if isinstance(users, list) else []:
        with contextlib.suppress(KeyError, TypeError):
            commands.append(Path(one["user"]["exec"]["command"]).name)
    return {_PLUGINS[command] for command in commands if command in _PLUGINS}
