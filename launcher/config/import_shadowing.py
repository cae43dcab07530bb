"""Refuses files beside a program that Python would import instead of this package.

Under `--arbor` the name `arbor` is ours too, first on the PYTHONPATH: a file beside the program hides it.
Neighbours: `preflight.py` asks for a program here, `remote_verbs.py` for one on a machine, `main.py` when
launch itself imported one (through PYTHONPATH). A folder without an `__init__.py` hides nothing: Python goes
on looking for a package.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from launcher.base.errors import PreflightError

# Our packages that a program imports: `launcher.client` and its imports, and those of the runtime's own
# programs.
PACKAGES = ("launcher", "runtime")
# Where they are, side by side.
_OURS = Path(__file__).resolve().parents[2]
_ARBOR = "arbor"
# `uv run --with x python my.py`: the program is among the first words, the later ones are its own.
_MAX_COMMAND_WORDS = 6
_PYTHON = re.compile(r"python[\d.]*")


def forms_of(package: str) -> tuple[str, str]:
    """The files by which Python finds a package of this name in a folder."""
    return f"{package}.py", f"{package}/__init__.py"


def refuse(command: Sequence[str], folder: Path, environ: Mapping[str, str], *, arbor: bool = False) -> None:
    """Raise PreflightError if `command`, begun in `folder`, would import another package than ours."""
    beside, on_path = _script_folder(command, folder), _on_path(folder, environ)
    looked_in = [(place, PACKAGES) for place in (*beside, *on_path)]
    if arbor:
        looked_in += [(place, (_ARBOR,)) for place in beside]
    for place, packages in looked_in:
        for package in packages:
            for form in forms_of(package):
                found = place / form
                if found.is_file() and not _is_ours(found, package):
                    raise shadowing_error(package, found)


def shadowing_error(package: str, found: PurePath) -> PreflightError:
    """The error for a file that stands in the way, by its folder if it is a package's."""
    path = found.parent if found.name == "__init__.py" else found
    return PreflightError(
        f"{path} hides the package {package} that comes with launch",
        f"Python looks in the program's folder first, so `import {package}` finds this one",
        f"mv {path} {path.with_name('my_' + path.name)}  # and change what imports it",
    )


def shadowed_import(error: BaseException) -> PreflightError | None:
    """The refusal if `error` is an import of ours that came upon another package in this very process."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    found = getattr(sys.modules.get(package), "__file__", None) if package in PACKAGES else None
    return None if found is None or _is_ours(Path(found), package) else shadowing_error(package, Path(found))


def script_of(command: Sequence[str]) -> str | None:
    """The Python file that a command runs, as far as its words tell; None for a module, code or no Python."""
    return next((word for word in command[:_MAX_COMMAND_WORDS] if word.endswith(".py")), None)


def _script_folder(command: Sequence[str], folder: Path) -> list[Path]:
    """Where Python looks first: beside the script, or here."""
    script = script_of(command)
    if script is not None and (folder / script).is_file():
        return [(folder / script).resolve().parent]
    is_python = any(_PYTHON.fullmatch(Path(word).name) for word in command[:_MAX_COMMAND_WORDS])
    return [folder] if is_python else []


def _on_path(folder: Path, environ: Mapping[str, str]) -> list[Path]:
    """The folders that Python searches before the installed packages."""
    return [folder / entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _is_ours(found: Path, package: str) -> bool:
    """Whether the found file is this very package's, also in the checkout that is in use, or a copy of it."""
    home = _OURS
    if package == _ARBOR:
        from launcher.records import endpoint  # psutil, which help does without

        home = endpoint.ARBOR_PATH
    ours = home / package / "__init__.py"
    try:
        return found.resolve() == ours or found.read_bytes() == ours.read_bytes()
    except OSError:
        return False
