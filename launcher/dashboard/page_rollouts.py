"""Rollout texts for the page, one step at a time, with the staleness of each step's samples.

Neighbours: `run_page_data.py` asks, `results/rollout_texts.py` has brought the files home with their secrets
hidden. Only files at home are read, never a machine's own. Nothing here is markup: texts go out as JSON
strings, and the page shows them as text.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.dashboard.page_steps import number
from launcher.results.rollout_texts import ROLLOUTS

_NAME = re.compile(r"step-(\d{6,12})\.jsonl")
# A step's file is a tenth of it at most; a larger one is read so far.
_MAX_BYTES = 8 * 2**20
_MAX_TEXT_LENGTH = 20_000
_TEXTS = ("group", "rollout", "predictor", "failure", "dropped", "finish_reason", "prompt", "completion")
_NUMBERS = ("call", "reward", "version", "temperature", "prompt_tokens", "tokens")
_CUTS = ("prompt_cut", "completion_cut")
# By one request no more files than these are looked through for the first time: the page asks again.
AT_ONCE = 40


@dataclass(frozen=True)
class StepTexts:
    """The texts of one step. `lag_mean`, `lag_most`: how many versions its samples were behind the step's
    policy, on average and at most; None if no sample has a version."""

    stamp: tuple[int, int]
    lines: int
    lag_mean: float | None
    lag_most: float | None


class RolloutFiles:
    """The files of one run. Used from one thread at a time."""

    def __init__(self, results: Path) -> None:
        self._folder = results / ROLLOUTS
        self._digests: dict[int, StepTexts] = {}

    def stamps(self) -> dict[int, tuple[int, int]]:
        """A stamp of each step's file, by step, which changes when the file is replaced."""
        found = {}
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if named := _NAME.fullmatch(entry.name):
                        it = entry.stat()
                        found[int(named[1])] = (it.st_mtime_ns, it.st_size)
        except OSError:
            return {}
        return found

    def summaries(self, most: int | None = AT_ONCE) -> dict[int, StepTexts]:
        """Summaries by step; the newest first, because not all may be read at once."""
        stamps = self.stamps()
        self._digests = {step: it for step, it in self._digests.items() if stamps.get(step) == it.stamp}
        new = sorted(stamps.keys() - self._digests.keys(), reverse=True)
        for step in new[:most]:
            self._digests[step] = _summarize(step, stamps[step], self.of_step(step))
        return dict(self._digests)

    def of_step(self, step: int) -> list[dict[str, Any]]:
        """The lines of a step, each with the same keys; empty without such a file."""
        return list(_lines(self._folder / f"step-{step:06d}.jsonl"))


def _summarize(step: int, stamp: tuple[int, int], rollouts: list[dict[str, Any]]) -> StepTexts:
    begun = step - 1
    lags = [max(0.0, begun - it["version"]) for it in rollouts if it["version"] is not None]
    mean, most = (sum(lags) / len(lags), max(lags)) if lags else (None, None)
    return StepTexts(stamp, len(rollouts), mean, most)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES)
    except OSError:
        return
    for text in content.splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            yield {
                **{name: _text(line.get(name)) for name in _TEXTS},
                **{name: number(line.get(name)) for name in _NUMBERS},
                **{name: line.get(name) is True for name in _CUTS},
            }


def _text(value: Any) -> str | None:
    """Lone surrogates, which no UTF-8 has, become a question mark."""
    if value is None:
        return None
    return str(value)[:_MAX_TEXT_LENGTH].encode(errors="replace").decode()
