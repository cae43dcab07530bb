"""Judgements by their content: the same trajectories under the same rubric are judged once.

In memory, the newest so many; in a folder too if one is given, a file for each. Neighbours:
`score_group.py` asks here first. Of judges it knows only their identity.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import OrderedDict
from pathlib import Path

from launcher.client.ruler.judge_answer import JudgeScore

_MAX_ENTRIES = 4096


class JudgementCache:
    """Safe to use from several threads, and its folder from several processes."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = Path(folder) if folder is not None else None
        self._kept: OrderedDict[str, dict[str, JudgeScore]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, identity: str, digest: str) -> dict[str, JudgeScore] | None:
        """The scores by id; None if nothing is kept, or nothing that can be read."""
        key = _key(identity, digest)
        with self._lock:
            if (known := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return known
        found = self._read(key)
        if found is not None:
            self._remember(key, found)
        return found

    def keep(self, identity: str, digest: str, scores: dict[str, JudgeScore]) -> None:
        """Keep them. A folder that cannot be written is an OSError."""
        key = _key(identity, digest)
        self._remember(key, scores)
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        part = self._folder / f".{key}.{os.getpid()}.{threading.get_ident()}"
        part.write_text(json.dumps({name: [it.score, it.explanation] for name, it in scores.items()}))
        part.replace(self._folder / f"{key}.json")

    def _remember(self, key: str, scores: dict[str, JudgeScore]) -> None:
        with self._lock:
            self._kept[key] = scores
            self._kept.move_to_end(key)
            while len(self._kept) > _MAX_ENTRIES:
                self._kept.popitem(last=False)

    def _read(self, key: str) -> dict[str, JudgeScore] | None:
        if self._folder is None:
            return None
        try:
            kept = json.loads((self._folder / f"{key}.json").read_text())
            return {
                name: JudgeScore(float(score), str(explanation))
                for name, (score, explanation) in kept.items()
            }
        except (OSError, ValueError, TypeError, AttributeError):
            return None


def _key(identity: str, digest: str) -> str:
    return hashlib.sha256(f"{identity}\n{digest}".encode()).hexdigest()
