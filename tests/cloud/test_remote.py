"""A run's folder on a machine: set up, served, seen and copied over a real ssh; the runtime has no engine."""

from __future__ import annotations

import sys
import textwrap

import pytest

from tests.cloud.rig import REPOSITORY, Rig

pytestmark = pytest.mark.slow

_PROGRAM = """
import json, secrets, shlex, shutil, subprocess, threading, time
from pathlib import Path
import psutil
from launcher.machines import scripts
from launcher.machines.link import Link, run_on
from launcher.machines.remote import RemoteFolder
from launcher.machines.startup import Startup, reason_of_end
from launcher.machines.unix_http import get_json
from runtime.fitness import Needs
from runtime.schema import RuntimeConfig
from tests.cloud import bare
begun = time.monotonic()
def told(what):
    print(f"[{time.monotonic() - begun:.1f}] {what}", flush=True)
here = Path.cwd()
TOKEN = "canary-" + secrets.token_hex(8)
SECRET = "canary-" + secrets.token_hex(8)
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
folder.write(scripts.TOKEN, TOKEN.encode() + b"\\n")
folder.write(scripts.SECRETS, f"HF_TOKEN={SECRET}\\n".encode())
modes = run_on(
    host, f"cd {state} && stat -c %a {scripts.TOKEN} {scripts.SECRETS} {state} {sockets}"
).stdout.split()
assert modes == [b"600", b"600", b"700", b"700"]
serving = threading.Thread(target=job, args=(scripts.serve(state),), daemon=True)
serving.start()
link = Link(host, here / "g.sock", sockets + "/gateway.sock")
link.start()
def code_of():
    folder.look()
    return folder.exit_code()
Startup("slip-0123abcd", folder.here, here / "g.sock", told).wait(TOKEN, code_of, 60)
told(f"ready: {get_json(here / 'g.sock', '/healthz')}")

said = run_on(host, "cat /proc/[0-9]*/cmdline | tr '\\\\0' ' '").stdout.decode()
assert "runtime.keeper" in said
for canary in (TOKEN, SECRET):
    assert canary not in said
    assert not any(canary in " ".join(process.cmdline()) for process in psutil.process_iter())
    assert run_on(host, f"grep -rl {canary} {state} /tmp ~/.bash_history 2>/dev/null").stdout == b""
assert run_on(host, f"ls {state}/{scripts.TOKEN} {state}/{scripts.SECRETS}").stdout == b""
of_keeper = f"grep -lz HF_TOKEN={SECRET[:7]} /proc/[0-9]*/environ"
assert run_on(host, of_keeper).stdout
told("no token")

folder.fetch(folder.here)
assert (folder.here / "logs" / "keeper.log").exists() and not (folder.here / "runtime.json").exists()
while not (folder.here / "keeper.json").exists():
    assert time.monotonic() - begun < 60
    folder.look()
    time.sleep(0.1)
keeper = json.loads((folder.here / "keeper.json").read_text())["pid"]
run_on(host, f"kill -TERM {keeper}")
while folder.exit_code() is None:
    assert time.monotonic() - begun < 60
    folder.look()
    time.sleep(0.1)
serving.join(timeout=10)
told(f"ended {folder.exit_code()}: {reason_of_end(folder.here)}")
link.close()
"""


def test_a_runtime_is_set_up_served_and_seen_over_ssh_and_its_token_is_nowhere(runtime_rig: Rig) -> None:
    program = f"REPOSITORY = {str(REPOSITORY)!r}\n" + textwrap.dedent(_PROGRAM)
    environ = runtime_rig.environ(PYTHONPATH=str(REPOSITORY))
    said = runtime_rig.run([sys.executable, "-c", program], seconds=120, environ=environ).ok()
    print(said)
    assert "ended 0: it was told to end" in said
