"""Other people's clients, each in a virtual environment of its own: their pins collide with ours.

A test drives such a client as a program, over HTTP. An environment is built once, and found by what it has.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

# Each with the releases it was tried with.
# httpx is what our own client has with it, and all that it needs beside pydantic.
AGENTS = ("openai-agents==0.24.0", "httpx==0.28.1")
PYDANTIC_AI = ("pydantic-ai-slim[openai,anthropic]==2.62.0", "httpx==0.28.1")
LITELLM = ("litellm==1.106.2", "mcp", "httpx==0.28.1")
LM_EVAL = ("lm_eval==0.4.13", "requests", "aiohttp", "tenacity", "transformers>=5")
VERIFIERS = ("verifiers==0.4.0",)
# Its server, too. It needs a click that our `cloud` extra does not allow.
OPENENV = ("openenv==0.10.0", "httpx==0.28.1")
LANGGRAPH = ("langgraph==1.2.22", "langchain-openai==1.7.3")
# With openai 3 its own client fails at the first request, as it gives httpx's time-outs to what is httpx2
# there; with polars 2 its delete_checkpoints(), as it takes a mean of a column of times.
ART = ("openpipe-art==0.5.18", "openai<3", "polars<2", "numpy", "pyarrow")


@functools.cache
def python_with(requirements: tuple[str, ...]) -> Path:
    """The Python of the environment that has these. Built on first use (a download on a fresh machine)."""
    from launcher.base.home import Home

    digest = hashlib.sha256("\n".join((sys.version, *requirements)).encode()).hexdigest()[:12]
    folder = Home.find().environments / f"foreign-{digest}"
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not python.exists():
            _build(folder, requirements)
    return python


def _build(folder: Path, requirements: tuple[str, ...]) -> None:
    """In another folder, which takes the name when it is whole. Elsewhere: our own pins are not for it."""
    part = folder.with_suffix(f".{os.getpid()}")
    environ = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    try:
        for words in (
            ("venv", "--relocatable", "--python", sys.executable, str(part)),
            ("pip", "install", "--python", str(part / "bin" / "python"), *requirements),
        ):
            subprocess.run(["uv", *words, "--quiet"], check=True, cwd=folder.parent, env=environ, timeout=900)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
