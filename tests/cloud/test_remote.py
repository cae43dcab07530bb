"""A run's folder on a machine: set up, served, seen and copied over a real ssh; the runtime has no engine."""

from __future__ import annotations

import re
import sys
import textwrap

import pytest

from runtime import shield
from tests.cloud.rig import REPOSITORY, Rig

pytestmark = pytest.mark.slow

_PROGRAM = """
import json, secrets, shlex, shutil, time
from pathlib import Path
from launcher.machines import scripts
from launcher.machines.link import Link, run_on
from launcher.machines.remote import RemoteFolder
from launcher.machines.remote_job import RemoteJob
from launcher.machines.startup import Startup, reason_of_end
from launcher.machines.unix_http import get_json
from runtime.fitness import Needs
from runtime.schema import RuntimeConfig
from tests.cloud import bare
from tests.support.canaries import CommandLines
begun = time.monotonic()
def told(what):
    print(f"[{time.monotonic() - begun:.1f}] {what}", flush=True)
def until(done):
    while not done():
        assert time.monotonic() - begun < 90
        time.sleep(0.1)
here = Path.cwd()
TOKEN = "canary-" + secrets.token_hex(8)
SECRET = "canary of 'quotes' $(false) \\\\ " + secrets.token_hex(8)
_, host = bare.rent(here)
state, sockets = "/home/ubuntu/slipway/slip-0123abcd", "/tmp/slip-0123abcd"
folder = RemoteFolder(host, state, here / "machine")
folder.make(sockets)
told("machine")

code = here / "code" / "runtime"
shutil.copytree(REPOSITORY + "/runtime", code, ignore=shutil.ignore_patterns("__pycache__"))
shutil.copy(REPOSITORY + "/tests/support/small_runtime.py", code / "__main__.py")
RemoteFolder(host, "/home/ubuntu/" + scripts.CODE, here).send(here / "code")
def job(script):
    return run_on(host, f"cd {scripts.CODE} && bash -c {shlex.quote(script)}")
done = job(scripts.setup(state, Needs("cpu", "H100:4")))
assert done.returncode == 0, done
told("set up: " + run_on(host, f"cat {state}/python").stdout.decode())
unfit = job(scripts.setup(state, Needs("cuda", "H100:4")))
assert unfit.returncode == 1 and b"no NVIDIA driver is there" in unfit.stdout.splitlines()[-1], unfit

config = RuntimeConfig(run_id="slip-0123abcd", model_path="tiny", state_dir=state, socket_dir=sockets)
folder.write("runtime.json", config.model_dump_json().encode())
assert run_on(host, f"cd {state} && stat -c %a runtime.json . {sockets}").stdout == b"600\\n700\\n700\\n"
with CommandLines() as lines:
    given = scripts.given(TOKEN, {"HF_TOKEN": SECRET})
    for _ in range(2):  # as after an answer that was lost: one runs
        RemoteJob(folder, "serve").start(scripts.serve(state), stdin=given)
    # One that dies before it has read them.
    RemoteJob(folder, "deaf").start("exit 3\\n", stdin=given)
    link = Link(host, here / "g.sock", sockets + "/gateway.sock")
    link.start()
    def code_of():
        folder.look()
        return folder.exit_code()
    Startup("slip-0123abcd", folder.here, here / "g.sock", told).wait(TOKEN, code_of, 60)
    told(f"ready: {get_json(here / 'g.sock', '/healthz')}")
    until(lambda: folder.look() or (folder.here / "keeper.json").exists())
keeper = json.loads((folder.here / "keeper.json").read_text())["pid"]
shown = run_on(host, "cat /proc/[0-9]*/cmdline | tr '\\\\0' ' '").stdout.decode()
assert shown.count("-m runtime.keeper") == 1
assert lines.looks > 20 and not lines.holding([TOKEN, SECRET])
kept = run_on(host, f"sudo grep -zc '^HF_TOKEN=canary' /proc/{keeper}/environ").stdout
assert kept == b"1\\n", kept
assert SECRET in run_on(host, f"sudo cat /proc/{keeper}/environ").stdout.decode()
new = "sudo find / ~ /tmp /var/tmp /dev/shm -xdev -newer /run/seed.json -type f"
wanted = f"{TOKEN}|{SECRET[-16:]}|slip-0123abcd"
held = run_on(host, f"{new} -exec grep -oEH '{wanted}' {{}} +").stdout.decode()
assert f"{state}/runtime.json:slip-0123abcd" in held
assert TOKEN not in held and SECRET[-16:] not in held, held
told("no secret")

group = run_on(host, f"awk '/^Gid/ {{print $2}}' /proc/{keeper}/status").stdout.decode().strip()
as_runtime = f"sudo setpriv --reuid $(id -u) --regid {group} --init-groups --no-new-privs"
def asked(prefix):
    python = f"env PYTHONPATH=/home/ubuntu/{scripts.CODE} $(cat {state}/python)"
    done = run_on(host, f"{prefix} {python} -c 'from runtime import shield; print(shield.reached())'")
    return done.stdout.decode().strip() or done.stderr.decode()
told(f"the runtime reaches {asked(as_runtime)}, skylet's user {asked('')}")
assert b"no new privileges" in run_on(host, f"{as_runtime} sudo -n true").stderr
assert (folder.here / "logs" / "serve.log").read_text() == ""

folder.fetch(folder.here)
assert (folder.here / "logs" / "keeper.log").exists() and not (folder.here / "runtime.json").exists()
run_on(host, f"kill -TERM {keeper}")
def ended():
    folder.look()
    return folder.exit_code() is not None
until(ended)
told(f"ended {folder.exit_code()}: {reason_of_end(folder.here)}")
link.close()

run_on(host, "sudo rm /etc/sudoers.d/90-cloud")
done = job(f"$(cat {state}/python) -m runtime.shield -- echo it runs")
told(done.stdout.decode() + done.stderr.decode())
"""


def test_g14_a_runtime_is_served_over_ssh_with_secrets_that_are_nowhere_and_no_way_to_the_metadata_service(
    runtime_rig: Rig,
) -> None:
    program = f"REPOSITORY = {str(REPOSITORY)!r}\n" + textwrap.dedent(_PROGRAM)
    environ = runtime_rig.environ(PYTHONPATH=str(REPOSITORY))
    said = runtime_rig.run([sys.executable, "-c", program], seconds=150, environ=environ).ok()
    print(said)
    assert "the runtime reaches [], skylet's user ['169.254.169.254']" in said
    assert "ended 0: it was told to end" in said
    # Where there is no sudo it is said, in one line, and the runtime runs all the same.
    (line,) = re.findall(f"{shield.REACHABLE}.*", said)
    assert "169.254.169.254" in line and "sudo" in line
    assert "it runs" in said
