"""A run's endpoint: its address, its token file, and the environment of a program that uses it.

Neighbours: `run.py` makes one when the relay listens, `run_verbs.py` finds it again from a record.
The token is in a file of its own (0600) in the run's folder, never in the record, and goes with the run.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base import proxies, timeout_budget
from launcher.base.errors import UsageError
from launcher.base.log import REDACTOR
from launcher.console.output import phase_name
from launcher.records.records import RUN_VARIABLE, RecordStore, RunRecord

if TYPE_CHECKING:
    from launcher.types.settings import Settings

_TOKEN_FILE = "token"
RESULTS = "results"
# Arbor's, and here that of ART's programs too; the relay takes the next free one when it is taken.
DEFAULT_PORT = 7453
SERVED_NAME = "policy"
# Under `--arbor` first on the program's path; nothing but a package `arbor` is in it, and that is ours.
ARBOR_PATH = Path(__file__).resolve().parents[1] / "client" / "arbor" / "on_path"
_PYTHONPATH = "PYTHONPATH"
# Of the program that `launch` itself starts; `launch env` does not give them.
PROGRAM_VARIABLE = "LAUNCH_PROGRAM"
LINE_VARIABLE = "LAUNCH_LINE"


@dataclass(frozen=True)
class LocalEndpoint:
    """A run's endpoint on this computer. `root` is its address without `/v1`. `timeout_budget_seconds`:
    how long the relay retries a runtime that does not answer (`timeout_budget.py`)."""

    root: str
    token: str
    run_id: str
    run_dir: Path
    timeout_budget_seconds: float
    openai_env: bool = False
    arbor: bool = False
    art: bool = False

    @property
    def base_url(self) -> str:
        """The base URL for an OpenAI client."""
        return f"{self.root}/v1"

    def variables(self) -> dict[str, str]:
        """The run's variables in the program's environment."""
        variables = {
            "LAUNCH_BASE_URL": self.base_url,
            "LAUNCH_API_KEY": self.token,
            "LAUNCH_MODEL": SERVED_NAME,
            "LAUNCH_RUN_DIR": str(self.run_dir),
            "LAUNCH_RUN_ID": self.run_id,
            timeout_budget.VARIABLE: str(math.ceil(self.timeout_budget_seconds)),
        }
        if self.openai_env:
            variables |= {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.token}
        return variables

    def environ(
        self, environ: Mapping[str, str], after_step: int = 0, line: str | None = None
    ) -> dict[str, str]:
        """The program's whole environment: the user's, the variables, and no proxy before 127.0.0.1.

        `after_step`: the step the run was resumed after, 0 in its first life. The life's name tells a program
        that is started again which files an earlier life of this run left (client/dspy); no other run has
        that name. Two lives may be resumed after one step, if the first trained no further one: each has a
        name of its own. `line`: the whole line that started the run, for the hints of the client.
        """
        mixed = {**environ, **self.variables(), RUN_VARIABLE: self.run_id}
        mixed[PROGRAM_VARIABLE] = f"{self.run_id}@{after_step}.{secrets.token_hex(4)}"
        mixed.pop(LINE_VARIABLE, None)  # of another run, around this one
        if line is not None:
            mixed[LINE_VARIABLE] = line
        if self.arbor:
            mixed |= arbor_pythonpath(environ)
        return mixed | proxies.for_program(environ)

    def exports(self, token_file: Path | None = None) -> str:
        """Lines for a shell; with `token_file` they read the token from there instead of showing it."""
        lines = []
        for name, value in self.variables().items():
            secret = token_file is not None and value == self.token
            shown = f'"$(cat {shlex.quote(str(token_file))})"' if secret else shlex.quote(value)
            lines.append(f"export {name}={shown}")
        for name, value in proxies.for_program(os.environ).items():
            lines.append(f"export {name}={shlex.quote(value)}")
        if self.arbor:
            kept = f'"${{{_PYTHONPATH}:+:${_PYTHONPATH}}}"'
            lines.append(f"export {_PYTHONPATH}={shlex.quote(str(ARBOR_PATH))}{kept}")
        return "\n".join(lines)

    @classmethod
    def of(cls, record: RunRecord, store: RecordStore) -> LocalEndpoint:
        """The endpoint of a live run. Raises UsageError when it has none (yet, or any more)."""
        folder = store.folder(record.id)
        with contextlib.suppress(FileNotFoundError):
            token = token_file(folder).read_text().strip()
            REDACTOR.hide([token])
            if record.url and is_open(record):
                openai_env = bool(record.details.get("openai_env"))
                arbor, art = bool(record.details.get("arbor")), bool(record.details.get("art"))
                waits = timeout_budget.of_record(record.details.get("plan") or {})
                return cls(record.url, token, record.id, folder / RESULTS, waits, openai_env, arbor, art)
        label = record.name or record.id
        if record.elsewhere:
            where = f"it lives on {record.location}"
            raise UsageError(f"{label} has no endpoint here", where, f"launch status {label}")
        raise UsageError(
            f"{label} has no endpoint now",
            f"its phase is {phase_name(record.state)}",
            f"launch status {label}",
        )


def arbor_pythonpath(environ: Mapping[str, str]) -> dict[str, str]:
    """The PYTHONPATH that `--arbor` gives the program: our folder is first."""
    return {_PYTHONPATH: os.pathsep.join(filter(None, [str(ARBOR_PATH), environ.get(_PYTHONPATH)]))}


def wanted_port(settings: Settings) -> int | None:
    """The only port that will do, None for any: a program for Arbor or ART has its port in its text."""
    return DEFAULT_PORT if settings.port is None and keyless_option(settings) else settings.port


def keyless_option(settings: Settings) -> str | None:
    """The option by which this user's programs need no key; None if they do."""
    return "--arbor" if settings.arbor else "--art" if settings.art else None


def other_port_hint(port: int, option: str) -> str:
    """The hint for programs of another trainer that cannot have this port."""
    if option == "--art":
        return f"launch --art --port {port + 1}  # and {port + 1} in your program's addresses"
    return f"launch --arbor --port {port + 1}  # and {port + 1} in your program's addresses"


def is_open(record: RunRecord) -> bool:
    """Whether the run's endpoint can exist: the relay lives in the `launch` process, on its computer."""
    return record.live and record.launch_alive


def token_file(folder: Path) -> Path:
    """The file of a run's token."""
    return folder / _TOKEN_FILE


def save_token(folder: Path, token: str) -> None:
    """Write the token, readable by this user only."""
    descriptor = os.open(token_file(folder), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        file.write(token + "\n")


def delete_token(folder: Path) -> None:
    """Delete the token file."""
    token_file(folder).unlink(missing_ok=True)
