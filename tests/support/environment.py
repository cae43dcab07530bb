"""The runtime's environment, built once by the product's own bootstrap, with pytest on top."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAMS = REPOSITORY / "tests" / "programs"


@functools.cache
def runtime_python(variant: str = "cpu") -> Path:
    """The Python that has vLLM, torchtune and pytest. Built on first use (a download on a fresh machine)."""
    if variant == "cpu" and (chosen := os.environ.get("SLIPWAY_TEST_RUNTIME_PYTHON")):
        return Path(chosen)
    from launcher.base.home import Home
    from runtime import bootstrap

    return bootstrap.ensure_environment(Home.find().environments, variant=variant, extras=("test",))


def runtime_environ(tree: Path = REPOSITORY) -> dict[str, str]:
    """The environment of a process that runs the runtime's code from `tree`."""
    return {
        **os.environ,
        "PYTHONPATH": str(tree),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def python_with(script: Path, folder: Path) -> Path:
    """Make a program that is this Python with a folder first on its path; whatever starts it with `-P`."""
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n')
    script.chmod(0o700)
    return script
