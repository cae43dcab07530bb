"""How long `launch` lets people wait: `python -m tests.bench.cli_times` prints one JSON object.

Each figure is the median of several starts, in seconds of wall clock from fork to exit, or to the first byte
on a terminal. `sky --help`, where it is installed, is the comparison.
"""

from __future__ import annotations

import json
import os
import platform
import pty
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

STARTS = 7
LAUNCH = [sys.executable, "-m", "launcher.cli.main"]


def until_exit(command: list[str], environ: dict[str, str]) -> float:
    """Seconds from start to exit."""
    begun = time.perf_counter()
    subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return time.perf_counter() - begun


def until_first_byte(command: list[str], environ: dict[str, str]) -> float:
    """Seconds from start to the first byte on a terminal."""
    begun = time.perf_counter()
    pid, master = pty.fork()
    if pid == 0:
        os.execvpe(command[0], command, environ)
    os.read(master, 1)
    took = time.perf_counter() - begun
    os.close(master)
    os.waitpid(pid, 0)
    return took


def median(measure, command: list[str], environ: dict[str, str], starts: int = STARTS) -> float:
    return round(statistics.median(measure(command, environ) for _ in range(starts)), 3)


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        environ = {**os.environ, "LAUNCH_HOME": home, "TERM": "xterm"}
        found = {
            "help_seconds": median(until_exit, [*LAUNCH, "--help"], environ),
            "status_seconds": median(until_exit, [*LAUNCH, "status"], environ),
            "config_seconds": median(until_exit, [*LAUNCH, "config"], environ),
            "doctor_seconds": median(until_exit, [*LAUNCH, "doctor"], environ),
            # A run that is refused: what comes first is the same.
            "run_first_output_seconds": median(until_first_byte, [*LAUNCH, "--", "no-such-program"], environ),
            "bare_python_seconds": median(until_exit, [sys.executable, "-c", "pass"], environ),
        }
        if sky := shutil.which("sky"):
            found["sky_help_seconds"] = median(until_exit, [sky, "--help"], environ, starts=3)
    machine = {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}
    print(json.dumps({**found, "starts": STARTS, "machine": machine}))


if __name__ == "__main__":
    main()
