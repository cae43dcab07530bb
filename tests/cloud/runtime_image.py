"""Our runtime's environment as a part of the machine image: mounted where its bootstrap looks for it.

Neighbours: `rig.py` takes the binds. The environment is the one that tests and local runs use.
"""

from __future__ import annotations

from pathlib import Path

from launcher.backends.ssh.machine_scripts import ENVIRONMENTS
from tests.support.warm import warm_environment


def runtime_binds() -> dict[Path, str]:
    """What a machine sees: the environment and the Python it links to."""
    python = warm_environment()
    environment = python.parent.parent
    interpreter = python.resolve().parent.parent
    binds = {environment: f"{ENVIRONMENTS}/{environment.name}"}
    # A distribution's own Python is on the machine anyway.
    return binds if interpreter == Path("/usr") else binds | {interpreter: str(interpreter)}
