"""A step's batch: samples, their policy versions and rewards; whole on disk or absent.

Neighbours: the gateway writes one folder per step (handover.py), the recipe reads them in order. numpy and
safetensors only; knows nothing of torch, models or advantages.

Names carry dimensions: N tokens of all sequences end to end, S sequences, M members (rollouts in a group). A
sequence is one sample, or several if turns went on from one another id for id (turns.py). In batch.json the
list "samples" describes the sequences, one each, with their samples as `turns`.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from runtime.shared import json_files

SCHEMA = 1
# With answers that were held to grammars: a trainer that knows none would take their logprobs for others.
GRAMMAR_SCHEMA = 2
_TENSORS = "batch.safetensors"
META = "batch.json"
# name -> (dtype, dimension): the file's whole content.
_LAYOUT: dict[str, tuple[str, str]] = {
    "tokens": ("int32", "N"),
    "sampled": ("uint8", "N"),
    "logprobs": ("float32", "N"),
    "offsets": ("int64", "S+1"),
    "temperature": ("float32", "S"),
    "version": ("int64", "S"),
    "truncated": ("uint8", "S"),
    "member": ("int64", "S"),
    "reward": ("float32", "M"),
    "group": ("int64", "M"),
}


class BatchError(Exception):
    """The folder does not hold a batch that can be trained on; the text has the reason."""


@dataclass(frozen=True)
class Batch:
    """One step's sequences. A "restore" step has `meta` and empty arrays.

    In a "supervised" step nothing was sampled or rewarded: `sampled` marks the tokens of its answers, which
    are learned; its members are examples, in one group with reward 0; `version` is -1.

    `sampled` is 1 where the engine sampled the token (loss goes there and nowhere else) and `logprobs` holds
    the engine's own logprob of it, at the temperature it sampled with; 0 elsewhere.
    """

    tokens: NDArray[np.int32]
    sampled: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    offsets: NDArray[np.int64]
    temperature: NDArray[np.float32]
    version: NDArray[np.int64]
    truncated: NDArray[np.uint8]
    member: NDArray[np.int64]
    reward: NDArray[np.float32]
    group: NDArray[np.int64]
    meta: dict[str, Any]

    @property
    def sequences(self) -> int:
        """S."""
        return len(self.offsets) - 1

    @property
    def step(self) -> int:
        """The step's number, 1 and up."""
        return int(self.meta["step"])

    @property
    def kind(self) -> str:
        """ "train", "supervised" or "restore"."""
        return str(self.meta.get("kind", "train"))

    @property
    def empty_before(self) -> dict[str, int]:
        """The number of `steps` without a lesson since the last one, and of their `samples`."""
        return self.meta.get("empty") or {}

    @property
    def of_other_grammars(self) -> list[int]:
        """The sequences that the trainer's grammars do not allow (grammar_masks.py)."""
        return self.meta.get("of_other_grammars") or []

    @functools.cached_property
    def turns(self) -> NDArray[np.int64]:
        """The number of samples that each sequence joins [S]."""
        listed = self.meta.get("samples") or [{}] * self.sequences
        return np.asarray([len(one.get("turns") or (1,)) for one in listed], np.int64)

    @functools.cached_property
    def answers(self) -> NDArray[np.int64]:
        """Which answer each token was sampled in [N], of all sequences' turns in their order; -1: in none."""
        found = np.full(len(self.tokens), -1, np.int64)
        listed = self.meta.get("samples") or [{}] * self.sequences
        answer = 0
        for row, one in enumerate(listed):
            inside, sampled = found[self.span(row)], self.sampled[self.span(row)].astype(bool)
            for turn in one.get("turns") or ({"start": 0, "end": len(inside)},):
                part = slice(turn["start"], turn["end"])
                inside[part][sampled[part]] = answer
                answer += 1
        return found

    @functools.cached_property
    def sampled_by(self) -> NDArray[np.int64]:
        """The policy version that sampled each token [N]; -1 if none did."""
        listed = self.meta.get("samples") or [{}] * self.sequences
        by_answer = [
            turn.get("version", int(self.version[row]))
            for row, one in enumerate(listed)
            for turn in one.get("turns") or ({},)
        ]
        answers = self.answers
        return np.where(answers >= 0, np.asarray([*by_answer, -1], np.int64)[answers], -1)

    @functools.cached_property
    def staleness(self) -> NDArray[np.int64]:
        """How many steps were committed since the version that sampled each token [N]; -1: none sampled it.

        By the gateway's numbers, which it has judged staleness by; in a batch without these, by the versions'
        numbers, which also count failed steps.
        """
        lags = {int(version): lag for version, lag in (self.meta.get("lags") or {}).items()}
        by = self.sampled_by
        found = np.full(len(by), -1, np.int64)
        for version in np.unique(by[by >= 0]).tolist():
            found[by == version] = max(lags.get(version, self.step - 1 - version), 0)
        return found

    def span(self, sequence: int) -> slice:
        """The range of a sequence among the N tokens."""
        return slice(int(self.offsets[sequence]), int(self.offsets[sequence + 1]))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The tensors by name."""
        return {name: getattr(self, name) for name in _LAYOUT}


def empty_batch(meta: dict[str, Any]) -> Batch:
    """A batch without sequences: a restore step."""
    arrays = {name: np.zeros(1 if size == "S+1" else 0, dtype) for name, (dtype, size) in _LAYOUT.items()}
    return Batch(**arrays, meta=meta)


def step_folder(steps: Path, step: int) -> Path:
    """`steps/000007`."""
    return steps / f"{step:06d}"


def write_batch(folder: Path, batch: Batch) -> None:
    """Write `folder` in one rename, fsynced. Raises OSError, and BatchError where `read_batch` would."""
    _check(batch, folder.name)
    partial = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if batch.kind != "restore":
        arrays = {name: np.ascontiguousarray(value) for name, value in batch.arrays().items()}
        try:
            save_file(arrays, partial / _TENSORS)
        except SafetensorError as error:  # its way of saying that the disk is full
            raise OSError(str(error)) from error
    (partial / META).write_text(json.dumps(batch.meta))
    for path in (*partial.iterdir(), partial):
        json_files.fsync(path)
    os.rename(partial, folder)
    json_files.fsync(folder.parent)


def restored_from(steps: Path) -> set[str]:
    """The checkpoints that the steps recorded in this folder go back to."""
    found = set()
    for path in steps.glob(f"??????/{META}"):
        try:
            meta = json.loads(path.read_text())
        except (OSError, ValueError):
            continue  # the reader of that step reports the error
        if isinstance(meta, dict) and meta.get("kind") == "restore":
            found.add(str(meta.get("from")))
    return found


def read_batch(folder: Path) -> Batch:
    """Read and check a step's folder. Raises BatchError."""
    try:
        meta = json.loads((folder / META).read_text())
        if not isinstance(meta, dict):
            raise BatchError(f"{folder.name}: {META} is no object")
        if meta.get("kind") == "restore":
            batch = empty_batch(meta)
            _check(batch, folder.name)
            return batch
        arrays = load_file(folder / _TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise BatchError(f"{folder.name}: {error}") from error
    if set(arrays) != set(_LAYOUT):
        raise BatchError(f"{folder.name}: holds {sorted(arrays)}, not {sorted(_LAYOUT)}")
    batch = Batch(**arrays, meta=meta)
    _check(batch, folder.name)
    return batch


def _check(batch: Batch, name: str) -> None:
    schema = GRAMMAR_SCHEMA if batch.meta.get("grammars") else SCHEMA
    if batch.meta.get("schema") != schema:
        raise BatchError(f"{name}: schema {batch.meta.get('schema')}, not {schema}")
    if batch.kind not in ("train", "supervised", "restore") or not isinstance(batch.meta.get("step"), int):
        raise BatchError(f"{name}: step {batch.meta.get('step')} of kind {batch.kind}")
    if batch.kind == "restore" and not isinstance(batch.meta.get("from"), str):
        raise BatchError(f"{name}: a restore step that names no checkpoint")
    sizes = {"N": len(batch.tokens), "S+1": len(batch.offsets), "S": batch.sequences, "M": len(batch.reward)}
    for tensor, (dtype, size) in _LAYOUT.items():
        value = getattr(batch, tensor)
        if value.dtype != np.dtype(dtype) or value.shape != (sizes[size],):
            raise BatchError(
                f"{name}: {tensor} is {value.dtype}{list(value.shape)}, not {dtype}[{sizes[size]}]"
            )
    if batch.kind != "restore":
        _check_sequences(batch, name)
    if batch.kind == "supervised":
        _check_learned(batch, name)


def _check_sequences(batch: Batch, name: str) -> None:
    if batch.sequences < 1:
        raise BatchError(f"{name}: no sequence")
    lengths = np.diff(batch.offsets)
    if batch.offsets[0] != 0 or batch.offsets[-1] != len(batch.tokens) or (lengths < 2).any():
        raise BatchError(f"{name}: offsets do not cut the tokens into sequences")
    for index, bound, what in (
        (batch.member, len(batch.reward), "member"),
        (batch.group, _groups(batch), "group"),
    ):
        if ((index < 0) | (index >= bound)).any():
            raise BatchError(f"{name}: a {what} index is out of range")
    if len(batch.turns) != batch.sequences:
        raise BatchError(f"{name}: {len(batch.turns)} sequences are described, {batch.sequences} are there")
    if not np.array_equal(batch.answers >= 0, batch.sampled.astype(bool)):
        raise BatchError(f"{name}: the turns described are not what was sampled")
    if batch.sampled[batch.offsets[:-1]].any():
        raise BatchError(f"{name}: a sequence begins with a sampled token; it needs a prompt")
    if (batch.tokens < 0).any():
        raise BatchError(f"{name}: a token id is negative")
    # Written so that NaN is refused too.
    if not ((batch.temperature > 0) & np.isfinite(batch.temperature)).all():
        raise BatchError(f"{name}: a sequence has no temperature above 0, so no behaviour distribution")


def _check_learned(batch: Batch, name: str) -> None:
    """Neither reward nor logprob: code that takes it for a step of rewards must find nothing to learn."""
    if batch.reward.any() or batch.logprobs.any() or (batch.temperature != 1).any():
        raise BatchError(f"{name}: examples have rewards, logprobs or a temperature")
    if not np.add.reduceat(batch.sampled.astype(np.int64), batch.offsets[:-1]).all():
        raise BatchError(f"{name}: a sequence has no answer to learn")


def _groups(batch: Batch) -> int:
    groups = batch.meta.get("groups")
    return len(groups) if isinstance(groups, list) else 0
