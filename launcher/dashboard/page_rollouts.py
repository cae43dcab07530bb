"""Rollout texts for the page, one file at a time, and a search in all of them.

    step-7               those of step 7
    validation-7-score   those of the validation `score` of its version
    empty-7-1            those of the first step after step 7 of which nothing was trained

Neighbours: `run_page_data.py` asks, `results/rollout_texts.py` has brought the files home with their secrets
hidden. Only files at home are read, never a machine's own. Nothing here is markup: texts go out as JSON
strings, and the page shows them as text.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.results.rollout_texts import ROLLOUTS
from launcher.results.run_history import mapping, number
from runtime.shared.rollout_files import FILE, order_of

# A file is as large at most; a larger one is read so far.
_MAX_BYTES = 8 * 2**20
_MAX_TEXT_LENGTH = 20_000
_TEXTS = ("group", "rollout", "predictor", "failure", "dropped", "finish_reason", "prompt", "completion")
_NUMBERS = (
    "member", "call", "turn", "continues", "reward", "version", "temperature", "prompt_tokens", "tokens"
)  # fmt: skip
_CUTS = ("prompt_cut", "completion_cut")
# By one request no more files than these are read for the first time: the page asks again.
AT_ONCE = 40
# Of one search, as `static/rollouts.js` has them for a page on a disk.
MAX_HITS, MAX_LIKE = 200, 2000
_AROUND, _SHOWN = 80, 320


@dataclass(frozen=True)
class TextFile:
    """One file; its `kind` is step, validation or empty. `step`: the step, the version that was validated, or
    the step that an empty one came after. `staleness_mean`, `staleness_max`: how many steps its samples were
    behind the policy; `cut_off`: the share of its answers that ended at a length limit. None if no sample
    tells."""

    name: str
    kind: str
    step: int
    stamp: tuple[int, int]
    rollouts: int
    staleness_mean: float | None
    staleness_max: float | None
    cut_off: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"stamp": None}


class RolloutFiles:
    """The files of one run. Used from one thread at a time."""

    def __init__(self, results: Path) -> None:
        self._folder = results / ROLLOUTS
        self._read: dict[str, TextFile] = {}

    def stamps(self) -> dict[str, tuple[int, int]]:
        """A stamp of each file, by the page's name of it, which changes when the file is replaced."""
        found = {}
        try:
            entries = list(os.scandir(self._folder))
        except OSError:
            return {}
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # the oldest go as we look
                if name := _name(entry.name):
                    it = entry.stat()
                    found[name] = (it.st_mtime_ns, it.st_size)
        return found

    def summaries(self, most: int | None = AT_ONCE) -> list[TextFile]:
        """In the order of the steps; the newest are read first, because not all may be read at once."""
        stamps = self.stamps()
        self._read = {name: it for name, it in self._read.items() if stamps.get(name) == it.stamp}
        new = sorted(stamps.keys() - self._read.keys(), key=_order, reverse=True)
        for name in new[:most]:
            self._read[name] = _summary(name, stamps[name], self.lines(name))
        return sorted(self._read.values(), key=lambda it: _order(it.name))

    def names(self) -> list[str]:
        """Of all files, in the order of their steps."""
        return sorted(self.stamps(), key=_order)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The lines of a file, each with the same keys; empty without such a file."""
        return [_line(it) for it in _objects(self._content(name).splitlines())]

    def search(self, text: str, most: int = MAX_HITS) -> Iterator[dict[str, Any]]:
        """The newest texts first that have `text` in them, in any case."""
        needle = _needle(text).decode(errors="replace").lower()
        for name in reversed(self.names()):
            for raw in self._content(name).splitlines():
                if needle not in raw.decode(errors="replace").lower():
                    continue
                for line in map(_line, _objects([raw])):
                    if (hit := _hit(line, text)) is not None and most:
                        yield {"file": name, **hit}
                        most -= 1
            if not most:
                return

    def like(self, name: str, group: str, member: str, most: int = MAX_LIKE) -> Iterator[dict[str, Any]]:
        """The rollouts of all steps that began with the same prompt as this one of this file, the newest
        first: each as its last line."""
        key = (group, member)
        prompts = [it["prompt"] for it in self.lines(name) if key_of(it) == key]
        if not prompts or not prompts[0]:
            return
        needle = _needle(prompts[0])
        for other in reversed(self.names()):
            if needle not in self._content(other):
                continue
            rollouts: dict[tuple[str, str], list[dict[str, Any]]] = {}
            for line in self.lines(other):
                rollouts.setdefault(key_of(line), []).append(line)
            for lines in rollouts.values():
                if lines[0]["prompt"] == prompts[0] and most:
                    answer = (lines[-1]["completion"] or "")[:_SHOWN]
                    yield {"file": other, **_known(lines[-1]), "after": answer}
                    most -= 1
            if not most:
                return

    def _content(self, name: str) -> bytes:
        try:
            with (self._folder / _file(name)).open("rb") as file:
                return file.read(_MAX_BYTES)
        except OSError:
            return b""


def key_of(line: dict[str, Any]) -> tuple[str, str]:
    """A rollout's name in its file: its group, and its place there. Lines of an older runtime have no place:
    what has one id and one reward is one rollout."""
    member = line["member"]
    place = f"{line['rollout']} {line['reward']}" if member is None else str(member)
    return line["group"] or "", place


def _known(line: dict[str, Any]) -> dict[str, Any]:
    names = ("group", "rollout", "predictor", "reward", "turn", "dropped")
    return {"key": key_of(line), **{name: line[name] for name in names}}


def _hit(line: dict[str, Any], text: str) -> dict[str, Any] | None:
    for where in ("completion", "prompt", "rollout", "group", "failure"):
        whole = line[where] or ""
        at = whole.lower().find(text.lower())
        if at >= 0:
            end = at + len(text)
            before, after = whole[max(0, at - _AROUND) : at], whole[end : end + _AROUND]
            return _known(line) | {"where": where, "before": before, "found": whole[at:end], "after": after}
    return None


def _needle(text: str) -> bytes:
    """As the file's JSON has it."""
    return json.dumps(text, ensure_ascii=False)[1:-1].encode(errors="replace")


def _name(file: str) -> str | None:
    named = FILE.fullmatch(file)
    if named is None:
        return None
    kind, step, rest = named["kind"], str(int(named["step"])), named["rest"]
    if kind == "empty":
        rest = str(int(rest)) if rest and rest.isdecimal() else None
    if (kind == "step") != (rest is None):
        return None
    return "-".join((kind, step) if rest is None else (kind, step, rest))


def _file(name: str) -> str:
    kind, step, *rest = name.split("-", 2)
    last = [f"{int(rest[0]):02d}"] if kind == "empty" else rest
    return "-".join([kind, f"{int(step):06d}", *last]) + ".jsonl"


def _order(name: str) -> tuple[int, ...]:
    return order_of(Path(f"{name}.jsonl"))


def _summary(name: str, stamp: tuple[int, int], lines: list[dict[str, Any]]) -> TextFile:
    kind, number_of, *_ = name.split("-", 2)
    step = int(number_of)
    begun = step - 1 if kind == "step" else step
    lags = [max(0.0, begun - it["version"]) for it in lines if it["version"] is not None]
    ends = [it["finish_reason"] for it in lines if it["finish_reason"] is not None]
    return TextFile(
        name,
        kind,
        step,
        stamp,
        len({key_of(it) for it in lines}),
        number(sum(lags) / len(lags)) if lags else None,
        max(lags) if lags else None,
        sum(it == "length" for it in ends) / len(ends) if ends else None,
    )


def _objects(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    for text in lines:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            yield line


def _line(line: dict[str, Any]) -> dict[str, Any]:
    measured = {str(name): number(value) for name, value in mapping(line.get("metrics")).items()}
    return {
        **{name: _text(line.get(name)) for name in _TEXTS},
        **{name: number(line.get(name)) for name in _NUMBERS},
        **{name: line.get(name) is True for name in _CUTS},
        "metrics": measured,
    }


def _text(value: Any) -> str | None:
    """Lone surrogates, which no UTF-8 has, become a question mark."""
    if value is None:
        return None
    return str(value)[:_MAX_TEXT_LENGTH].encode(errors="replace").decode()
