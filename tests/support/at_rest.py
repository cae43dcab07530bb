"""Whether processes have taken in what was sent to them, or stand still, for tests that then go on.

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
        asleep = all(_threads_are(pid, "S") for pid in self._pids)
        self._asleep = self._asleep + 1 if asleep else 0
        return self._asleep >= _LOOKS


def stands_still(pid: int) -> bool:
    """Whether no thread of a process that was sent SIGSTOP runs any more: each stops when it next has a
    processor, and until the first of them had one all others go on."""
    return _threads_are(pid, "T")


def _threads_are(pid: int, state: str) -> bool:
    stats = (task / "stat" for task in Path(f"/proc/{pid}/task").iterdir())
    # The command's name, in brackets, may itself hold blanks and brackets.
    return all(stat.read_text().rpartition(")")[2].split()[0] == state for stat in stats)
