"""Whether processes have taken in what was sent to them, for tests that then go on with what comes after.

A process that has work and gets no processor is runnable, not asleep: on a busy computer this waits longer,
where a pause of a fixed length would be over too soon. Linux; standard library only.
"""

from __future__ import annotations

from pathlib import Path

_LOOKS = 10


class AtRest:
    """A condition for `waiting.py`: true once all threads of these processes slept at ten looks in a row."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._asleep = 0

    def __call__(self) -> bool:
        self._asleep = self._asleep + 1 if all(map(_sleeps, self._pids)) else 0
        return self._asleep >= _LOOKS


def _sleeps(pid: int) -> bool:
    stats = (task / "stat" for task in Path(f"/proc/{pid}/task").iterdir())
    # The command's name, in brackets, may itself hold blanks and brackets.
    return all(stat.read_text().rpartition(")")[2].split()[0] == "S" for stat in stats)
