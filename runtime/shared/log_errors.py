"""Finds the error that ended a process, in its log.

Neighbours: supervision.py asks of a child, `launcher/backends/runtime_start.py` of one that does not
start. Pure but for reading the log.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

LINES = 12
# An engine's error is followed by those of the processes around it, and by its libraries' last lines.
_END_BYTES = 256 * 1024
# vLLM's prefix of a line: the process, and for a logged line its level, time and place.
_BEFORE = re.compile(r"(\(\w+ pid=\d+\) )?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^]]*\] )?")
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception): \S")
# vLLM's processes whose errors cause its server's.
_WORKER_PREFIXES = ("(EngineCore", "(Worker")
# In errors that refer to another one as their cause.
_POINTERS_TO_CAUSE = ("See root cause above", "for the root cause")


def final_error(log: Path) -> list[str]:
    """The lines up to the error that a process ended with; else its last ones. At most `LINES`.

    Of a process of vLLM's that is its first, in the log's last life: others follow from it. Of a traceback it
    is the last.
    """
    lines = tail(log, _END_BYTES)
    errors = [(place, who) for place, line in enumerate(lines, 1) if (who := _cause(line)) is not None]
    if not errors:
        return lines[-LINES:]
    place, who = ([error for error in errors if error[1].startswith(_WORKER_PREFIXES)] or errors)[-1]
    if who:
        place = next(first for first, one in errors if one == who)
    return lines[:place][-LINES:]


def strip_log_prefix(line: str) -> str:
    """A log line without vLLM's prefix."""
    return line[_log_prefix(line).end() :].strip()


def tail(log: Path, most_bytes: int) -> list[str]:
    """The end of a log, empty lines left out; nothing when there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()]


def _cause(line: str) -> str | None:
    """The process whose own error a line reports, "" for one without a name; None without an error."""
    before = _log_prefix(line)
    says = _ERROR.match(line, before.end()) and not any(words in line for words in _POINTERS_TO_CAUSE)
    return (before[1] or "") if says else None


def _log_prefix(line: str) -> re.Match[str]:
    found = _BEFORE.match(line)
    assert found is not None  # it may match nothing
    return found
