"""A run's logs for the page: which there are, and a piece of one.

Neighbours: `run_page_data.py` asks, `records/log_files.py` knows the files. A log is read by pieces, from
where the page has read to: it may be long, and it grows. What looks like a secret is hidden.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.records.log_files import log_files
from launcher.results.rollout_texts import redact

# Of one piece. A page begins with so much of the end.
PIECE_BYTES = 64 * 2**10


def listed(folder: Path) -> list[dict[str, Any]]:
    """Name and size in bytes of each log that is not empty."""
    found = [{"name": name, "size": _size(path)} for name, path in log_files(folder).items()]
    return [it for it in found if it["size"]]


def piece(folder: Path, name: str, start: int | None, most: int = PIECE_BYTES) -> dict[str, Any] | None:
    """The lines of a log from byte `start` on, of its end without one; `end`: where the next piece begins.

    A log that is shorter than `start` has begun anew: its piece is the end again. None without such a log.
    """
    path = log_files(folder).get(name)
    if path is None:
        return None
    size = _size(path)
    anew = start is None or start > size
    begin = max(0, size - most) if start is None or start > size else start
    try:
        with path.open("rb") as file:
            file.seek(begin)
            content = file.read(most)
    except OSError:
        return None
    whole = content[: content.rfind(b"\n") + 1] or content[: most if len(content) == most else 0]
    end = begin + len(whole)
    if anew and begin:  # the first line has no beginning
        whole = whole[whole.find(b"\n") + 1 :]
    text = redact(whole.decode(errors="replace"))
    return {"name": name, "text": text, "start": begin, "end": end, "size": size, "anew": anew}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
