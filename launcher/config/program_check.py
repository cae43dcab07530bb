"""Checks that a program's Python can parse it and finds its imports, before anything is paid for.

That Python itself runs `import_probe.py`, with the words, the folder and the environment that the program
will have. Only a file that is given to a Python is checked (`python my.py`); `-m`, `-c`, `uv run`, a shell's
script and a notebook are not, and no message is shown. A certain failure is refused, a likely one is a
warning. Nothing of the program is executed.
Neighbours: `request_validation.py` asks; `preflight.py` has checked that the program exists.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.base.errors import PreflightError
from launcher.config import import_probe
from launcher.records import endpoint

# A Python that has not answered by then is not waited for, and no message is shown.
BOUND_SECONDS = 1.0
_PYTHON = re.compile(r"python[\d.]*t?")
# Options that another run of the same Python takes as well; some have a word of their own.
_OPTIONS = re.compile(r"-[bBdEIOPqsu]+|-[WX].+")
_OPTIONS_WITH_VALUE = ("-W", "-X")
# Its imports come from the standard library alone, whatever files are in the user's folders.
_BEGIN = (
    "import os, sys; path = sys.path[:]; sys.path[:] = [os.path.dirname(os.__file__)];"
    " names = {'__name__': 'asked_python'}; exec(sys.argv[1], names); names['main'](path, sys.argv[2])"
)
# A script in a Python's place may choose another one by the words after it; pyenv's looks at none of them.
_PYENV = 'exec "$program" "$@"'
_PYENV_FILE_VARIABLE = "PYENV_FILE_ARG"


@dataclass(frozen=True)
class _ProgramStart:
    """A file given to a Python: the words before it, the file as it was typed, its folder and environment."""

    python: tuple[str, ...]
    script: str
    folder: Path
    environ: Mapping[str, str]


def check(
    command: Sequence[str],
    folder: Path | None,
    environ: Mapping[str, str],
    *,
    arbor: bool = False,
    bound_seconds: float | None = None,
) -> str | None:
    """A warning about imports that may be missing, None if none is known to be. `environ`: this process's.

    Raises PreflightError if its Python cannot parse the program, or cannot find its first imports.
    """
    if arbor:
        environ = {**environ, **endpoint.arbor_pythonpath(environ)}
    started = _started(command, folder or Path.cwd(), environ)
    bound_seconds = BOUND_SECONDS if bound_seconds is None else bound_seconds
    probed = _probe(started, bound_seconds) if started is not None else None
    if started is None or probed is None:
        return None
    python = f"{started.python[0]} ({probed['version']})"
    if syntax := probed.get("syntax"):
        line, what = syntax
        raise PreflightError(
            f"cannot run {started.script}",
            f"line {line} is no Python to {python}: {what}",
            shlex.join((started.python[0], "-m", "py_compile", started.script)),
        )
    if (missing := probed.get("missing")) is None:
        return None
    name, line, sure = missing
    if sure == import_probe.CERTAIN:
        why = f"line {line} imports {name}, which {python} does not find"
        raise PreflightError(
            f"cannot run {started.script}", why, _python_with_module(started, name, bound_seconds)
        )
    if sure == import_probe.UNKNOWN:
        return None
    return f"{started.script} imports {name} in line {line}, and {python} finds no {name} now"


def _started(command: Sequence[str], folder: Path, environ: Mapping[str, str]) -> _ProgramStart | None:
    """The program as a file for a Python that can be asked; None if its words do not show one."""
    if not command or not _PYTHON.fullmatch(Path(command[0]).name):
        return None
    at = 1
    while at < len(command) and (command[at] in _OPTIONS_WITH_VALUE or _OPTIONS.fullmatch(command[at])):
        at += 2 if command[at] in _OPTIONS_WITH_VALUE else 1
    script = command[at] if at < len(command) else ""
    if not script.endswith(".py") or not (folder / script).is_file() or not _is_itself(command[0], folder):
        return None
    if zipfile.is_zipfile(folder / script):  # a Python runs it as it is, and its text is in it
        return None
    return _ProgramStart(tuple(command[:at]), script, folder, environ)


def _is_itself(python: str, folder: Path) -> bool:
    """Whether this is a Python, and no script that chooses one by its arguments."""
    found = shutil.which(str(folder / python) if os.sep in python else python)
    try:
        text = Path(found or "").read_bytes()[:4096]
    except OSError:
        return False
    is_pyenv = _PYENV.encode() in text and _PYENV_FILE_VARIABLE.encode() not in text
    return not text.startswith(b"#!") or is_pyenv


def _probe(started: _ProgramStart, bound_seconds: float) -> dict[str, Any] | None:
    """Its Python's report on the program; None if it does not come in time."""
    text = Path(import_probe.__file__).read_text()
    try:
        done = subprocess.run(
            [*started.python, "-c", _BEGIN, text, started.script],
            cwd=started.folder,
            env=dict(started.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=bound_seconds,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith(import_probe.MARK)]
        return ast.literal_eval(lines[-1].removeprefix(import_probe.MARK)) if lines else None
    except (OSError, ValueError, SyntaxError, subprocess.SubprocessError):
        return None


def _python_with_module(started: _ProgramStart, name: str, bound_seconds: float) -> str:
    """A command that shows a Python which has it, where one is near; else that this one has not."""
    for python in (started.folder / ".venv" / "bin" / "python", Path(sys.executable)):
        if not python.is_file():
            continue
        probed = _probe(replace(started, python=(str(python),)), bound_seconds / 2)
        if probed is not None and (probed.get("missing") or ("",))[0] != name and "syntax" not in probed:
            return f"{_importing(str(python), name)}  # it is there: name this Python after --"
    return f"{_importing(started.python[0], name)}  # install it there, or name a Python that has it"


def _importing(python: str, name: str) -> str:
    return shlex.join((python, "-c", f"import {name}"))
