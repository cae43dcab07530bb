"""Types commands where it runs and says how each went: `type_elsewhere.py HOME LINES`.

LINES is a list of lists of words, as JSON; the answer a list of [exit code, stdout, stderr]. A machine that
is a folder (`recorded_machine.py`) is one of those that are known.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from launcher.teardown import leftovers
from tests.support import recorded_machine
from tests.support.typed import Typed


def main(home: Path, lines: list[list[str]]) -> None:
    recorded_machine.register()
    leftovers.socket_parents = lambda: []
    typed = Typed(home.parent / "project", home)
    done = [typed(*words) for words in lines]
    print(json.dumps([[one.returncode, one.stdout, one.stderr] for one in done]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
