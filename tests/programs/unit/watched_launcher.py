"""A launcher as far as the guardian can see, and its end: `watched_launcher.py HOME END`.

Record, guardian, machine; then a keeper whose child leaves its session (and does not hear TERM where END is
"KILL"), a straggler that no record names, and a program. It says its run and its guardian, and ends at the
next line: END is "released", "exception", "exit", or the signal that kills it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from launcher.backends.local_machine import LocalMachine
from launcher.base.home import Home
from launcher.base.processes import ProcessId
from launcher.records.records import RUN_VARIABLE, RecordStore
from launcher.teardown import guardian, minder

HERE = Path(__file__).parent


def keeper(folder: Path, end: str) -> list[str]:
    """A command whose child is in a session of its own."""
    child = [str(HERE / "wait_for_signal.py"), str(folder / "child"), *(["TERM"] if end == "KILL" else [])]
    return [sys.executable, str(HERE / "run_in_own_session.py"), sys.executable, *child]


def main(home: Path, end: str) -> None:
    store = RecordStore(Home(home, home, home))
    run_id = store.create(name="watched").id
    machine = LocalMachine(run_id, store.folder(run_id) / "machine", home / "environments")
    store.update(run_id, machine=machine.describe())
    watch = guardian.start(store.path(run_id))
    store.update(run_id, guardian=watch.process)
    machine.provision()
    (Path(machine.socket_dir) / "gateway.sock").touch()
    (store.folder(run_id) / "token").write_text("secret")
    environ = {**os.environ, RUN_VARIABLE: run_id}
    kept = ProcessId.of(subprocess.Popen(keeper(home, end), env=environ, start_new_session=True).pid)
    assert kept is not None
    store.update(run_id, machine=machine.describe() | {"keeper": dataclasses.asdict(kept)})
    subprocess.Popen(["sleep", "999"], env=environ, start_new_session=True)
    program = minder.start(["sleep", "999"], environ)
    store.update(run_id, minder=program.process)
    print(json.dumps({"run_id": run_id, "guardian": watch.process.pid}), flush=True)
    sys.stdin.readline()
    if end == "released":
        program.terminate()
        machine.down()
        store.update(run_id, state="verified", ended_by="launch", proof=machine.proof().to_dict())
        watch.release()
    elif end == "exception":
        raise RuntimeError("a bug")
    elif end == "exit":
        sys.exit(0)
    else:
        os.kill(os.getpid(), getattr(signal, f"SIG{end}"))
        time.sleep(999)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
