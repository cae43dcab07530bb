"""The texts of a step, for people to read: `logs/rollouts/step-000007.jsonl`, a line a completion.

    {"step": 7, "group", "member", "rollout", "predictor", "call", "turn", "continues", "reward", "failure",
     "dropped", "metrics", "version", "temperature", "finish_reason", "prompt_tokens", "tokens", "prompt",
     "prompt_cut", "completion", "completion_cut"}

`member` numbers a group's rollouts from 0, `turn` a rollout's completions. `continues`: the turn whose ids,
prompt and completion, this prompt begins with; `prompt` is then what came after them. `prompt` and
`completion` are the engine's own ids as text, special tokens included; `…_cut`: the prompt's beginning, the
completion's end is left out. `dropped` is the reason why it is not trained. A member without a sample is a
line without text. Rollouts are whole.

A validation's rollouts and those of an empty step have files too (`shared/rollout_files.py`).

Bounded, and without text that looks like a secret. Neighbours: handover.py has it written before a batch is
handed over, queue.py for an empty step, selection.py has the named samples; the launcher brings the files
home. Nothing is trained from them.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from runtime.gateway.samples.samples import SampleStore
from runtime.gateway.steps.selection import Named, Selection
from runtime.shared import redaction
from runtime.shared.rollout_files import FILE, order_of
from runtime.shared.schema import Group, Member, Validation

log = logging.getLogger(__name__)

FOLDER = Path("logs") / "rollouts"
# Of a program's own words.
_PROGRAM_CHARACTERS = 400
# A key of so many characters that a cut went through has lost the form by which it would be hidden.
_LABEL_CHARACTERS = 400
# A private key in lines of its own, the longest in use.
_KEY_CHARACTERS = 8_000
# Of a validation, in the name of its file.
_NAME_CHARACTERS = 64
_BLANK = re.compile(r"\s")
_END_OF_KEY = re.compile(r"-----END [A-Z ]{0,30}PRIVATE KEY-----")

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class RolloutLogLimits:
    """The bounds of a step's file and of all files: whole rollouts, the oldest steps are removed first."""

    rollouts: int = 64
    prompt_characters: int = 4_000
    completion_characters: int = 8_000
    step_bytes: int = 4 * 2**20
    total_bytes: int = 64 * 2**20
    # Files of empty steps after the same step: the newest stay.
    empty_steps: int = 4


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
        self._lock = threading.Lock()

    def write(self, step: int, selection: Selection, store: SampleStore, why: Mapping[str, str]) -> None:
        """One step's file, whole or absent. `why`: the reasons of the samples that the trainer leaves out, by
        their ids. Errors are logged: no step fails by them."""
        with self._logged(f"step {step}"):
            self._write(f"step-{step:06d}.jsonl", step, selection, store, why)

    def write_empty(
        self, after: int, selection: Selection, store: SampleStore, why: Mapping[str, str] | None = None
    ) -> None:
        """The file of a step of which nothing is trained, sent after step `after`."""
        with self._logged(f"an empty step after step {after}"):
            found = sorted(map(order_of, self._folder.glob(f"empty-{after:06d}-*.jsonl")))
            number = found[-1][-1] + 1 if found else 1
            for _, _, old in found[: max(0, len(found) + 1 - self._bounds.empty_steps)]:
                (self._folder / f"empty-{after:06d}-{old:02d}.jsonl").unlink(missing_ok=True)
            self._write(f"empty-{after:06d}-{number:02d}.jsonl", after + 1, selection, store, why or {})

    def write_validation(
        self, validation: Validation, version: int, selection: Selection, store: SampleStore
    ) -> None:
        """The file of a validation of that version. `selection`: see `selection_of`."""
        compile_id = re.sub(r"[^\w.-]", "-", validation.compile, flags=re.ASCII)
        name = "-".join(filter(None, (validation.name, compile_id)))[:_NAME_CHARACTERS]
        with self._logged(f"the validation {validation.name} of version {version}"):
            self._write(f"validation-{version:06d}-{name}.jsonl", version, selection, store, {})

    @contextmanager
    def _logged(self, of: str) -> Iterator[None]:
        """One file at a time; an error is logged: no step fails by its texts."""
        with self._lock:
            try:
                yield
            except Exception as error:  # noqa: BLE001 - after any error the step itself is whole without the file
                log.warning("the texts of %s were not written: %s: %s", of, type(error).__name__, error)

    def _write(
        self, name: str, step: int, selection: Selection, store: SampleStore, why: Mapping[str, str]
    ) -> None:
        if not self._bounds.rollouts:
            return
        self._decode = self._decode or self._find_decode()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in self._folder.glob(".*.jsonl.*"):  # by a process that was killed
            left.unlink(missing_ok=True)
        partial = self._folder / f".{name}.{os.getpid()}"
        partial.write_bytes(b"".join(self._lines(step, selection, store, why)))
        partial.replace(self._folder / name)
        keep_newest(self._folder, self._bounds.total_bytes)

    def _lines(
        self, step: int, selection: Selection, store: SampleStore, why: Mapping[str, str]
    ) -> Iterator[bytes]:
        size = 0
        members = Counter[int]()
        for rollout in _chosen(selection, self._bounds.rollouts):
            group = rollout[0].group
            described = {"step": step, "group": selection.groups[group].id, "member": members[group]}
            members[group] += 1
            turns = _Turns()
            lines = [
                json.dumps(described | self._line(named, store, why, turns), ensure_ascii=False)
                for named in rollout
            ]
            part = b"".join(line.encode(errors="replace") + b"\n" for line in lines)
            size += len(part)
            if size > self._bounds.step_bytes:
                return
            yield part

    def _line(
        self, named: Named, store: SampleStore, why: Mapping[str, str], turns: _Turns
    ) -> dict[str, Any]:
        member, ref = named.member, named.ref
        line: dict[str, Any] = {
            "rollout": member.rollout or None,
            "predictor": _words(member.predictor),
            "call": member.call,
            "reward": member.reward,
            "failure": _words(member.failure),
            "dropped": named.dropped,
        }
        if member.metrics:
            line["metrics"] = {redaction.hide(name): value for name, value in member.metrics.items()}
        if ref is None:
            return line
        exchange, sample = store.load(ref)
        prompt_ids, completion_ids = exchange.prompts[sample.prompt], sample.completion_ids
        turn, continues, known = turns.add(prompt_ids, completion_ids)
        new_ids = prompt_ids[known:]
        # The end of a prompt tells most: the newest turn. Of more ids than characters are kept, none is
        # decoded.
        prompt_limit, completion_limit = self._bounds.prompt_characters, self._bounds.completion_characters
        prompt, completion = (
            self._text(new_ids[-prompt_limit:]),
            self._text(completion_ids[:completion_limit]),
        )
        if prompt is not None and len(new_ids) > prompt_limit:
            prompt = _without_first_word(prompt)
        if completion is not None and len(completion_ids) > completion_limit:
            completion = _without_last_word(completion)
        return line | {
            "rollout": ref.tags.rollout or line["rollout"],
            "predictor": ref.tags.predictor,
            "call": ref.tags.call,
            "turn": turn,
            "continues": continues,
            "dropped": named.dropped or why.get(ref.id),
            "version": ref.version,
            "temperature": exchange.temperature,
            "finish_reason": sample.finish_reason,
            "prompt_tokens": len(prompt_ids),
            "tokens": len(completion_ids),
            "prompt": None if prompt is None else prompt[-prompt_limit:],
            "prompt_cut": len(new_ids) > prompt_limit or len(prompt or "") > prompt_limit,
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


def selection_of(validation: Validation, store: SampleStore) -> Selection:
    """The rollouts that a validation names, with their samples."""
    selection = Selection()
    for place, it in enumerate(validation.rollouts):
        member = Member(rollout=it.rollout, reward=it.reward, failure=it.failure)
        selection.groups.append(Group(id=it.group or f"{place}", members=[member]))
        refs = store.of_rollout(it.rollout) or [None]
        selection.named += [Named(place, member, ref, None) for ref in refs]
    return selection


class _Turns:
    """The turns of one rollout so far, by which a prompt that goes on from one of them is recognised."""

    def __init__(self) -> None:
        self._known: list[list[int]] = []

    def add(self, prompt: list[int], completion: list[int]) -> tuple[int, int | None, int]:
        """The turn's number, the newest turn that it goes on from, and how many of its ids that one has."""
        continues, known = None, 0
        for number, ids in reversed(list(enumerate(self._known))):
            if len(prompt) > len(ids) and prompt[: len(ids)] == ids:
                continues, known = number, len(ids)
                break
        self._known.append(prompt + completion)
        return len(self._known) - 1, continues, known


def keep_newest(folder: Path, most_bytes: int) -> None:
    """Remove the files of the oldest steps until the others take no more than that."""
    total = 0
    found = [path for path in folder.glob("*.jsonl") if FILE.fullmatch(path.name)]
    for path in sorted(found, key=order_of, reverse=True):
        total += path.stat().st_size
        if total > most_bytes:
            path.unlink(missing_ok=True)


def _chosen(selection: Selection, most: int) -> list[list[Named]]:
    """The chosen rollouts: of whole groups, whose members can be compared, of every predictor in turn."""
    turn: Counter[str | None] = Counter()
    order: dict[int, int] = {}
    for index, group in enumerate(selection.groups):
        turn[group.predictor] += 1
        order[index] = turn[group.predictor]
    in_order = sorted(selection.named, key=lambda named: (order[named.group], named.group))
    rollouts = groupby(in_order, key=lambda named: (named.group, id(named.member)))
    return [list(named) for _, named in islice(rollouts, most)]
