"""The verbs that reach a rented machine: ssh, exec, push, and its logs as they grow.

Neighbours: `commands.py` calls these, `run_verbs.py` for logs; `backends/cloud_machine.py` connects. Knows
nothing of SkyPilot: a run's record has everything.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import PurePosixPath

from launcher.backends.cloud_machine import CloudMachine
from launcher.backends.ssh import machine_scripts, ssh_config
from launcher.backends.ssh.link import run_on
from launcher.backends.ssh.remote_log import MachineState, RemoteLog
from launcher.base.errors import EXIT_OK, JobFailed, LaunchError, UsageError
from launcher.base.home import Home
from launcher.config import import_shadowing, remote_tools
from launcher.console import sanitized_command
from launcher.console.output import Output
from launcher.records.records import RecordStore, RunRecord

_SSH_SECONDS = 20.0
# In these the machine goes, and a connection to it with it.
_ENDING_STATES = ("down", "unverified")


def ssh(output: Output, name: str, command: list[str], include: bool) -> int:
    """Become ssh to the run's machine. As with ssh, `command` is given to the shell there."""
    store = RecordStore(Home.find())
    machine = _machine(store.load(name))
    if include and ssh_config.include(store.runs):
        output.note("launch added one Include line to ~/.ssh/config, and removes it with the last run")
    words = machine.host.command(*(["--", *command] if command else []))
    sys.stdout.flush()
    os.execvp(words[0], words)


def execute(output: Output, name: str, command: list[str]) -> int:
    """Run a program on the machine, beside the runtime's code and with its Python first on the PATH.

    As over ssh it has all the rights of the machine's user: it is not shielded
    (`runtime/metadata_shield.py`). Its output goes to a file or a pipe unchanged.
    """
    if not command:
        raise UsageError("nothing to run", "the program goes after --", f"launch exec {name} -- nvidia-smi")
    machine = _machine(RecordStore(Home.find()).load(name))
    _refuse_shadowing(machine, command)
    there = (
        f"cd ~/{machine_scripts.CODE} && export PYTHONPATH=~/{machine_scripts.CODE}"
        f' PATH="$(dirname "$(cat {shlex.quote(machine.state_dir)}/{machine_scripts.PYTHON})"):$PATH"'
        f" && {shlex.join(command)}"
    )
    code = sanitized_command.run(machine.host.command("--", there), stdout=2 if output.as_json else 1)
    if output.as_json:
        output.result({"command": command, "exit_code": code}, "")
    if code:
        raise JobFailed(
            f"the command ended with exit code {code}",
            shlex.join(command),
            f"launch ssh {name}",
            job_exit_code=code,
        )
    return EXIT_OK


def push(output: Output, name: str) -> int:
    """Copy this installation's runtime to the machine of a live run."""
    begun = time.monotonic()
    _machine(RecordStore(Home.find()).load(name)).push()
    seconds = time.monotonic() - begun
    output.result(
        {"pushed": machine_scripts.CODE, "seconds": round(seconds, 3)},
        f"~/{machine_scripts.CODE} now matches this computer; each process of the runtime uses it "
        "once it restarts",
    )
    return EXIT_OK


def log(store: RecordStore, record: RunRecord, which: str, follow: bool) -> int | None:
    """Print a log of the runtime from the machine; None if the machine has no such log or cannot be
    reached. A broken connection is made again. Raises JobFailed when the log cannot be read on."""
    try:
        machine = _machine(record)
        path = shlex.quote(f"{machine.state_dir}/logs/{which}.log")
        if run_on(machine.host, f"test -f {path}", bound_seconds=_SSH_SECONDS).returncode:
            return None
    except LaunchError:
        return None

    def standing() -> MachineState:
        now = store.load(record.id)
        return "gone" if not now.live else "going" if now.state in _ENDING_STATES else "up"

    again = f"launch logs {record.name or record.id} --which {which}"
    RemoteLog(machine.host, path, follow, standing, again).show()
    return EXIT_OK


def _refuse_shadowing(machine: CloudMachine, command: list[str]) -> None:
    """A `runtime` of the user's beside the program there hides ours, as it does here."""
    script = import_shadowing.script_of(command)
    if script is None:
        return
    forms = " ".join(import_shadowing.forms_of("runtime"))
    done = run_on(
        machine.host,
        f'cd ~/{machine_scripts.CODE} && ours=$(pwd -P) && cd "$(dirname {shlex.quote(script)})" &&'
        f' test "$(pwd -P)" != "$ours" && for form in {forms}; do test -f $form && echo "$(pwd)/$form"; done',
        bound_seconds=_SSH_SECONDS,
    )
    if found := done.stdout.decode(errors="replace").splitlines():
        raise import_shadowing.shadowing_error("runtime", PurePosixPath(found[0]))


def _machine(record: RunRecord) -> CloudMachine:
    label = record.name or record.id
    if record.machine.get("kind") != CloudMachine.kind:
        raise UsageError(
            f"{label} has no rented machine", "it is a run on this computer", f"launch status {label}"
        )
    remote_tools.check_tools("ssh")
    if not record.live:
        raise UsageError(f"{label} is over", "its machine is gone", f"launch --resume {label}")
    return CloudMachine.from_description(record.machine)
