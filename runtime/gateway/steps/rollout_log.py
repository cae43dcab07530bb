"""The texts of a step, for people to read: `logs/rollouts/step-000007.jsonl`, a line a completion.

    {"step": 7, "group", "rollout", "predictor", "call", "reward", "failure", "dropped", "version",
     "temperature", "finish_reason", "prompt_tokens", "tokens", "prompt", "prompt_cut", "completion",
     "completion_cut"}

`prompt` and `completion` are the engine's own ids as text, special tokens included; `…_cut`: the prompt's
beginning, the completion's end is left out. `dropped` is the reason why the gateway does not train it; the
trainer's own exclusions are counted in `metrics.jsonl`. A member without a sample is a line without text.
Bounded, and without text that looks like a secret. Neighbours: handover.py has it written before a batch is
handed over, selection.py has the named samples; the launcher brings the files home. Nothing is trained from
them.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.gateway.samples.samples import SampleStore
from runtime.gateway.steps.selection import Named, Selection
from runtime.shared import redaction

log = logging.getLogger(__name__)

FOLDER = Path("logs") / "rollouts"
# Of a program's own words.
_PROGRAM_CHARACTERS = 400
# A key of so many characters that a cut went through has lost the form by which it would be hidden.
_LABEL_CHARACTERS = 400
# A private key in lines of its own, the longest in use.
_KEY_CHARACTERS = 8_000
_BLANK = re.compile(r"\s")
_END_OF_KEY = re.compile(r"-----END [A-Z ]{0,30}PRIVATE KEY-----")

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class RolloutLogLimits:
    """The bounds of a step's file and of all files: whole lines, the oldest steps are removed first."""

    completions: int = 64
    prompt_characters: int = 4_000
    completion_characters: int = 8_000
    step_bytes: int = 512 * 2**10
    total_bytes: int = 64 * 2**20


def tokenizer_of(model_path: str) -> Decode | None:
    """The decoder of a model's ids; None if the model has no `tokenizer.json` on this machine."""
    from huggingface_hub import try_to_load_from_cache
    from tokenizers import Tokenizer

    found: Any = Path(model_path) / "tokenizer.json"
    if not Path(model_path).is_dir():
        found = try_to_load_from_cache(model_path, "tokenizer.json")
    if not isinstance(found, str | Path) or not Path(found).is_file():
        return None
    tokenizer = Tokenizer.from_file(str(found))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


class RolloutLog:
    """The files of one run. `find_decode` is asked until it gives one: the model may still be downloaded."""

    def __init__(
        self,
        state_dir: Path,
        find_decode: Callable[[], Decode | None],
        bounds: RolloutLogLimits | None = None,
    ) -> None:
        self._folder = state_dir / FOLDER
        self._find_decode = find_decode
        self._decode: Decode | None = None
        self._bounds = bounds or RolloutLogLimits()

    def write(self, step: int, selection: Selection, store: SampleStore) -> None:
        """One step's file, whole or absent. Errors are logged: no step fails by them."""
        if not self._bounds.completions:
            return
        try:
            self._decode = self._decode or self._find_decode()
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in self._folder.glob(".step-*"):  # by a process that was killed
                left.unlink(missing_ok=True)
            partial = self._folder / f".step-{step:06d}.{os.getpid()}"
            partial.write_bytes(b"".join(self._lines(step, selection, store)))
            partial.replace(self._folder / f"step-{step:06d}.jsonl")
            keep_newest(self._folder, self._bounds.total_bytes)
        except Exception as error:  # noqa: BLE001 - after any error the step itself is whole without the file
            log.warning("the texts of step %d were not written: %s: %s", step, type(error).__name__, error)

    def _lines(self, step: int, selection: Selection, store: SampleStore) -> Iterator[bytes]:
        size = 0
        for named in _chosen(selection, self._bounds.completions):
            described = {"step": step, "group": selection.groups[named.group].id, **self._line(named, store)}
            line = json.dumps(described, ensure_ascii=False).encode(errors="replace") + b"\n"
            size += len(line)
            if size > self._bounds.step_bytes:
                return
            yield line

    def _line(self, named: Named, store: SampleStore) -> dict[str, Any]:
        member, ref = named.member, named.ref
        line = {
            "rollout": member.rollout or None,
            "predictor": _words(member.predictor),
            "call": member.call,
            "reward": member.reward,
            "failure": _words(member.failure),
            "dropped": named.dropped,
        }
        if ref is None:
            return line
        exchange, sample = store.load(ref)
        prompt_ids, completion_ids = exchange.prompts[sample.prompt], sample.completion_ids
        # The end of a prompt tells most: the newest turn. Of more ids than characters are kept, none is
        # decoded.
        prompt_limit, completion_limit = self._bounds.prompt_characters, self._bounds.completion_characters
        prompt, completion = (
            self._text(prompt_ids[-prompt_limit:]),
            self._text(completion_ids[:completion_limit]),
        )
        if prompt is not None and len(prompt_ids) > prompt_limit:
            prompt = _without_first_word(prompt)
        if completion is not None and len(completion_ids) > completion_limit:
            completion = _without_last_word(completion)
        return line | {
            "rollout": ref.tags.rollout,
            "predictor": ref.tags.predictor,
            "call": ref.tags.call,
            "version": ref.version,
            "temperature": exchange.temperature,
            "finish_reason": sample.finish_reason,
            "prompt_tokens": len(prompt_ids),
            "tokens": len(completion_ids),
            "prompt": None if prompt is None else prompt[-prompt_limit:],
            "prompt_cut": len(prompt_ids) > prompt_limit or len(prompt or "") > prompt_limit,
            "completion": None if completion is None else completion[:completion_limit],
            "completion_cut": len(completion_ids) > completion_limit
            or len(completion or "") > completion_limit,
        }

    def _text(self, ids: list[int]) -> str | None:
        """Hidden before it is cut: half of a key would not look like one."""
        return None if self._decode is None else redaction.hide(self._decode(ids))


def _words(text: str | None) -> str | None:
    """A program's own text or name, with secrets hidden, then cut."""
    return None if text is None else redaction.hide(text)[:_PROGRAM_CHARACTERS]


def _without_first_word(text: str) -> str:
    """A text whose beginning was cut, without its first word, which may be the end of a key."""
    end = _END_OF_KEY.search(text, 0, _KEY_CHARACTERS)  # of a whole one nothing is left
    text = text[end.end() :] if end else text
    blank = _BLANK.search(text, 0, _LABEL_CHARACTERS)
    return text[blank.end() if blank else _LABEL_CHARACTERS :]


def _without_last_word(text: str) -> str:
    """A text whose end was cut, without its last word, which may be the beginning of a key."""
    last = text[-_LABEL_CHARACTERS:]
    ends = [blank.start() for blank in _BLANK.finditer(last)]
    return text[: len(text) - len(last) + (ends[-1] if ends else 0)]


def keep_newest(folder: Path, most_bytes: int) -> None:
    """Remove the files of the oldest steps until the others take no more than that."""
    total = 0
    found = sorted(folder.glob("step-*.jsonl"), key=lambda path: (len(path.name), path.name), reverse=True)
    for path in found:
        total += path.stat().st_size
        if total > most_bytes:
            path.unlink(missing_ok=True)


def _chosen(selection: Selection, most: int) -> Sequence[Named]:
    """The chosen groups: whole ones, whose members can be compared, of every predictor in turn, and so many
    lines at most."""
    turn: Counter[str | None] = Counter()
    order: dict[int, int] = {}
    for index, group in enumerate(selection.groups):
        turn[group.predictor] += 1
        order[index] = turn[group.predictor]
    return sorted(selection.named, key=lambda named: (order[named.group], named.group))[:most]
