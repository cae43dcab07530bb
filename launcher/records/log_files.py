"""The log files of a run on this computer, by the names that `launch logs --which` takes.

Neighbours: `cli/run_verbs.py` prints one, `dashboard/page_logs.py` shows them. Reads no line of them.
"""

from __future__ import annotations

import re
from pathlib import Path

from launcher.records.endpoint import RESULTS

# Those of the launcher's own processes; of any run, wherever its machine is.
LAUNCHER_LOGS = ("launch", "program", "guardian")
# A machine names its logs itself.
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


def log_files(folder: Path) -> dict[str, Path]:
    """Those that are there: the machine's own files while they are here, else those that came home."""
    own = {name: folder / f"{name}.log" for name in LAUNCHER_LOGS}
    found = {path.stem: path for path in sorted((folder / RESULTS / "logs").glob("*.log"))}
    found |= {path.stem: path for path in sorted((folder / "machine" / "logs").glob("*.log"))}
    found = {name: path for name, path in found.items() if _NAME.fullmatch(name)} | own
    return {name: path for name, path in found.items() if path.exists()}
