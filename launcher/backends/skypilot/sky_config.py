"""The SkyPilot configuration of a run: the user's own settings that apply, and those that launch decides.

Neighbours: `sky_home.py` writes the result into the run's private home. Knows nothing of the values' meaning:
SkyPilot checks them when it reads the file.

Taken from the user: the sections of the clouds that may be rented from (VPC, internal addresses, ssh proxy,
labels …), and the general settings for making machines. Decided here: which clouds are allowed, and that no
credentials go to the machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from launcher.base.errors import PreflightError

# Below the user's home; SKYPILOT_GLOBAL_CONFIG names another one, as for SkyPilot itself.
CONFIG_PATH = ".sky/config.yaml"
VARIABLE = "SKYPILOT_GLOBAL_CONFIG"
# The address of a central API server, which SkyPilot itself would use before any in the file.
_SERVER = "SKYPILOT_API_SERVER_ENDPOINT"
# A project's own, in the folder SkyPilot is called in; a run's SkyPilot is called in another one.
_PROJECT = ".sky.yaml"
# Clouds where SkyPilot can be told to upload neither the cloud's credentials nor the key of its clusters.
_NO_UPLOAD = ("aws", "gcp")
_IDENTITY = "remote_identity"
# Its values that name no role.
_KEYWORDS = ("LOCAL_CREDENTIALS", "SERVICE_ACCOUNT", "NO_UPLOAD")
_PROXY = "ssh_proxy_command"
_AT_BOOT = "post_provision_runcmd"
_TAKEN = ("docker", "nvidia_gpus", "provision")
# Settings for the user's other clusters that a run ignores, each with the reason.
_NOT_TAKEN = {
    "admin_policy": "launch does not use it",
    "api_server": "a run has a SkyPilot API server of its own, on this computer",
    "workspace": "a run has a SkyPilot of its own",
    "active_workspace": "a run has a SkyPilot of its own",
    "workspaces": "a run has a SkyPilot of its own, and takes aws.profile of yours only",
    "logs": "a machine's logs go to this computer only",
}


def for_run(
    path: Path,
    clouds: list[str],
    home: Path,
    plugins: Iterable[str] = (),
    boot_commands: Sequence[str] = (),
) -> tuple[dict[str, Any], list[str]]:
    """The configuration of a run's SkyPilot, and a line for each setting of the user's file `path` that is
    left out.

    `home` is the user's own. `plugins`: clouds whose credentials only give access to the user's own clusters;
    nothing of them is uploaded. `boot_commands`: commands for a machine's first boot, before the user's own.

    Raises PreflightError when the file cannot be read.
    """
    users = _read(path)
    config = {name: users[name] for name in _TAKEN if name in users}
    left_out = [f"{path}: {name} is ignored: {why}" for name, why in _NOT_TAKEN.items() if name in users]
    if os.environ.get(_SERVER):  # its value may hold a password
        left_out.append(f"{_SERVER} is ignored: {_NOT_TAKEN['api_server']}")
    if Path(_PROJECT).exists():
        left_out.append(f"{_PROJECT} is ignored: put what a run needs from it into {path}")
    for cloud in clouds:
        section = users.get(cloud) or {}
        if not isinstance(section, dict):
            raise _unreadable(path, f"its {cloud} is not a mapping")
        section = dict(section)
        identity = section.pop(_IDENTITY, None)
        if _PROXY in section:
            section[_PROXY] = _expand_home(section[_PROXY], home)
        if cloud in _NO_UPLOAD and _is_role(identity):
            section[_IDENTITY] = identity
        else:
            if identity is not None:
                why = "no credentials go to a run's machine"
                left_out.append(f"{path}: {cloud}.{_IDENTITY} is ignored: {why}")
            if cloud in _NO_UPLOAD:
                section[_IDENTITY] = "NO_UPLOAD"
        if boot_commands:
            section[_AT_BOOT] = [*boot_commands, *(section.get(_AT_BOOT) or [])]
        config |= {cloud: section} if section else {}
    for cloud in plugins:
        config |= {cloud: {_IDENTITY: "NO_UPLOAD"}}
    profile = _aws_profile(users) if "aws" in clouds else None
    if profile is not None:
        config["workspaces"] = {"default": {"aws": {"profile": profile}}}
    return config | {"allowed_clouds": clouds}, left_out


def _is_role(identity: Any) -> bool:
    """Whether it names a role that machines are given, or one for each pattern of names. Then nothing is
    uploaded, and SkyPilot need not make a role of its own."""
    if isinstance(identity, list):
        return all(isinstance(one, dict) and all(map(_is_role, one.values())) for one in identity)
    return isinstance(identity, str) and identity.upper() not in _KEYWORDS


def _aws_profile(users: dict[str, Any]) -> str | None:
    """The profile of the workspace that the user works in."""
    active = users.get("active_workspace") or users.get("workspace") or "default"
    found: Any = users
    for name in ("workspaces", active, "aws", "profile"):
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, str) else None


def _expand_home(proxy: Any, home: Path) -> Any:
    """A proxy command, or one for each region, as the user's own shell would read it: SkyPilot's HOME is
    another one."""
    if isinstance(proxy, dict):
        return {region: _expand_home(command, home) for region, command in proxy.items()}
    return re.sub(r"(?<!\S)~/", f"{home}/", proxy) if isinstance(proxy, str) else proxy


def _read(path: Path) -> dict[str, Any]:
    import yaml  # comes with SkyPilot; `launch` without it rents nothing

    try:
        found = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _unreadable(path, error.strerror or "it cannot be opened") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        # Of a YAML error only the place: its text shows the line.
        mark = getattr(error, "problem_mark", None)
        raise _unreadable(path, f"line {mark.line + 1} is not YAML" if mark else "it is not text") from None
    if not isinstance(found, dict | None):
        raise _unreadable(path, "it is not a mapping")
    return found or {}


def _unreadable(path: Path, why: str) -> PreflightError:
    return PreflightError(f"SkyPilot's configuration {path} cannot be read", why, f"less {path}")
