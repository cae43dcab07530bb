"""Google's OS Login keeps the ssh key that SkyPilot adds for each run: it is removed once the end is proven.

SkyPilot adds one where the project has OS Login, and removes none. Neighbours: `cluster_teardown.py` calls
it before the run's home, where the key is, is removed. Knows nothing of machines.
"""

from __future__ import annotations

import subprocess

from launcher.backends.skypilot.sky_home import SkyHome
from launcher.base.errors import LaunchError

# gcloud takes a second or two to start.
_SECONDS = 30.0
# Of a home: each of SkyPilot's users has a key.
_KEYS = ".sky/clients/*/ssh/sky-key.pub"
_COMMAND = ("gcloud", "compute", "os-login", "ssh-keys")


def remove_keys(home: SkyHome) -> None:
    """Remove this home's keys from the user's OS Login profile, as far as it has them. Raises LaunchError."""
    for path in home.folder.glob(_KEYS):
        listed = _gcloud(home, "list", "--format=value(value.key)")
        # Without OS Login there is no list, and no key.
        if listed.returncode == 0 and path.read_text().split()[1] in listed.stdout:
            removed = _gcloud(home, "remove", f"--key-file={path}")
            if removed.returncode != 0:
                raise LaunchError("gcloud did not remove the run's ssh key", removed.stderr[-300:], None)


def _gcloud(home: SkyHome, *words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [*_COMMAND, *words],
            env=home.environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
    except FileNotFoundError as error:  # then SkyPilot has added none
        return subprocess.CompletedProcess(_COMMAND, 127, "", str(error))
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError("gcloud could not be asked for the run's ssh key", str(error), None) from None
