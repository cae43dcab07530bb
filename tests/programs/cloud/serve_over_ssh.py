"""Serves a run on a bare machine over ssh: set up, with secrets that are nowhere, shielded, copied, ended.

What must hold is asserted here, what its test reads is said. The runtime has no engine.
"""

from __future__ import annotations

import json
import secrets
import shlex
import shutil
import subprocess
from pathlib import Path

from launcher.backends.runtime_start import RuntimeStart, reason_of_end
from launcher.backends.ssh import machine_scripts
from launcher.backends.ssh.link import Link, SshHost, run_on
from launcher.backends.ssh.remote_folder import RemoteFolder
from launcher.backends.ssh.remote_job import RemoteJob
from launcher.backends.ssh.results_download import ResultsDownload
from launcher.base.unix_http import get_json
from runtime.fitness import Needs
from runtime.shared.runtime_config import RuntimeConfig
from tests.cloud import bare
from tests.support.canaries import CommandLines
from tests.support.environment import REPOSITORY
from tests.support.telling import told
from tests.support.waiting import wait_until

HERE = Path.cwd()
RUN_ID = "slip-0123abcd"
STATE, SOCKETS = f"/home/ubuntu/slipway/{RUN_ID}", f"/tmp/{RUN_ID}"
DOOR = HERE / "g.sock"
TOKEN = "canary-" + secrets.token_hex(8)
SECRET = "canary of 'quotes' $(false) \\ " + secrets.token_hex(8)
PASSWORD = "canary-" + secrets.token_hex(8)
# Of the user's environment: the machine cannot reach the proxy.
VARIABLES = {"HF_ENDPOINT": "https://hub.corp", "HTTPS_PROXY": f"http://me:{PASSWORD}@127.0.0.1:1"}
WAIT_SECONDS = 240.0


def job(host: SshHost, script: str) -> subprocess.CompletedProcess[bytes]:
    return run_on(host, f"cd {machine_scripts.CODE} && bash -c {shlex.quote(script)}")


def said(host: SshHost, command: str) -> str:
    return run_on(host, command).stdout.decode()


def set_up(host: SshHost) -> None:
    """The code is sent and its environment found; a machine without a GPU is not fit for one's build."""
    code = HERE / "code" / "runtime"
    shutil.copytree(REPOSITORY / "runtime", code, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "tests" / "support" / "small_runtime.py", code / "__main__.py")
    RemoteFolder(host, f"/home/ubuntu/{machine_scripts.CODE}", HERE).send(HERE / "code")
    done = job(host, machine_scripts.setup(STATE, Needs("cpu", "H100:4")))
    assert done.returncode == 0, done
    told("set up: " + said(host, f"cat {STATE}/python"))
    unfit = job(host, machine_scripts.setup(STATE, Needs("cuda", "H100:4")))
    assert unfit.returncode == 1 and b"there is no NVIDIA driver" in unfit.stdout.splitlines()[-1], unfit


def configure(folder: RemoteFolder) -> None:
    config = RuntimeConfig(run_id=RUN_ID, model_path="tiny", state_dir=STATE, socket_dir=SOCKETS)
    folder.write("runtime.json", config.model_dump_json().encode())
    modes = said(folder.host, f"cd {STATE} && stat -c %a runtime.json . {SOCKETS}")
    assert modes == "600\n700\n700\n"


def serve(folder: RemoteFolder) -> Link:
    """The link to a runtime that is ready and whose keeper has been seen."""
    given = machine_scripts.stdin_text(TOKEN, {"HF_TOKEN": SECRET}, VARIABLES)
    for _ in range(2):  # as after an answer that was lost: one runs
        RemoteJob(folder, "serve").start(machine_scripts.serve(STATE), stdin=given)
    # One that dies before it has read them.
    RemoteJob(folder, "deaf").start("exit 3\n", stdin=given)
    link = Link(folder.host, DOOR, f"{SOCKETS}/gateway.sock")
    link.start()
    RuntimeStart(RUN_ID, folder.here, DOOR, told).wait(TOKEN, lambda: exit_code(folder), 60)
    told(f"ready: {get_json(DOOR, '/healthz')}")
    wait_until(lambda: keeper_is_seen(folder), WAIT_SECONDS, "its keeper")
    return link


def exit_code(folder: RemoteFolder) -> int | None:
    folder.refresh()
    return folder.exit_code()


def keeper_is_seen(folder: RemoteFolder) -> bool:
    folder.refresh()
    return (folder.here / "keeper.json").exists()


def look_for_secrets(host: SshHost, keeper: int) -> None:
    """They are in the runtime's environment, and in no file that was written since the machine is up."""
    assert said(host, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").count("-m runtime.keeper") == 1
    kept = said(host, f"sudo grep -zc '^HF_TOKEN=canary' /proc/{keeper}/environ")
    assert kept == "1\n", kept
    environ = said(host, f"sudo cat /proc/{keeper}/environ")
    assert SECRET in environ and "HF_ENDPOINT=https://hub.corp" in environ and "HTTPS_PROXY" not in environ
    new = "sudo find / ~ /tmp /var/tmp /dev/shm -xdev -newer /run/seed.json -type f"
    wanted = f"{TOKEN}|{SECRET[-16:]}|{PASSWORD}|{RUN_ID}"
    held = said(host, f"{new} -exec grep -oEH '{wanted}' {{}} +")
    assert f"{STATE}/runtime.json:{RUN_ID}" in held
    assert TOKEN not in held and SECRET[-16:] not in held and PASSWORD not in held, held
    told("no secret")


def look_at_the_shield(host: SshHost, keeper: int) -> None:
    """What of the metadata service the runtime reaches, and the machine's own user."""
    group = said(host, f"awk '/^Gid/ {{print $2}}' /proc/{keeper}/status").strip()
    as_runtime = f"sudo setpriv --reuid $(id -u) --regid {group} --init-groups --no-new-privs"
    told(f"the runtime reaches {reached(host, as_runtime)}, skylet's user {reached(host, '')}")
    assert b"no new privileges" in run_on(host, f"{as_runtime} sudo -n true").stderr


def reached(host: SshHost, prefix: str) -> str:
    python = f"env PYTHONPATH=/home/ubuntu/{machine_scripts.CODE} $(cat {STATE}/python)"
    script = "from runtime import metadata_shield as it; print(it.reachable_services())"
    done = run_on(host, f"{prefix} {python} -c '{script}'")
    return done.stdout.decode().strip() or done.stderr.decode()


def bring_home_and_end(folder: RemoteFolder, keeper: int) -> None:
    (line,) = (folder.here / "logs" / "serve.log").read_text().splitlines()
    assert line.endswith(": HTTPS_PROXY"), "the proxy is left out, by its name"
    ResultsDownload(folder).run()
    assert (folder.here / "logs" / "keeper.log").exists() and not (folder.here / "runtime.json").exists()
    run_on(folder.host, f"kill -TERM {keeper}")
    wait_until(lambda: exit_code(folder) is not None, WAIT_SECONDS, "its end")
    told(f"ended {folder.exit_code()}: {reason_of_end(folder.here)}")


def run_without_sudo(host: SshHost) -> None:
    run_on(host, "sudo rm /etc/sudoers.d/90-cloud")
    done = job(host, f"$(cat {STATE}/python) -m runtime.metadata_shield -- echo it runs")
    told(done.stdout.decode() + done.stderr.decode())


def main() -> None:
    _, host = bare.rent(HERE)
    folder = RemoteFolder(host, STATE, HERE / "machine")
    folder.make(SOCKETS)
    told("machine")
    set_up(host)
    configure(folder)
    with CommandLines() as lines:
        link = serve(folder)
    assert lines.looks > 20 and not lines.holding([TOKEN, SECRET, PASSWORD])
    keeper = json.loads((folder.here / "keeper.json").read_text())["pid"]
    look_for_secrets(host, keeper)
    look_at_the_shield(host, keeper)
    bring_home_and_end(folder, keeper)
    link.close()
    run_without_sudo(host)


if __name__ == "__main__":
    main()
