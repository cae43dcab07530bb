"""A program's log of its trajectories: texts and averages in the run's folder, scores in the run.

    history.jsonl                   a line for each call: step, split, time, reward, metrics, …
    trajectories/val-000007.jsonl   a line for each group: its JSON, as `TrajectoryGroup(**line)` takes it

Both come home with the run. Of several lines with one split and step the last one counts, because a program
that begins again logs them again. Neighbours: `session.py` has this as a method;
`runtime/gateway/validations.py` keeps the scores, which `launch report` draws. Knows nothing of the training.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic_core import to_json

from launcher.base.sanitize import plain_text as sanitized
from launcher.client import standard_error
from launcher.client.connection import Connection
from launcher.client.failures import Refused
from launcher.client.request_bodies import Validation
from launcher.client.trajectories.members import choices_of, exception_reason, get_field, to_float, version_of
from launcher.client.trajectories.results import Logged
from launcher.client.trajectories.trajectory_group import Raised

HISTORY_FILE = "history.jsonl"
TRAJECTORIES_FOLDER = "trajectories"
TRAIN_SPLIT = "train"
# The split whose reward is a run's own score.
VALIDATION_SPLIT = "val"
_NAME = re.compile(r"[\w.-]{1,32}")


def log(
    connection: Connection,
    folder: Path | None,
    trajectories: Any,
    split: str,
    metrics: Mapping[str, float],
    step: int | None,
) -> Logged:
    """See `Session.log`."""
    if not _NAME.fullmatch(split):
        raise ValueError(f"a split's name has letters, digits, `_`, `.` or `-`, at most 32: {split!r}")
    groups = [*_as_groups(trajectories)]
    if step is None:
        step = _newest_version(groups)
    if step is None:
        step = connection.version
    line = {"step": step, "split": split, "time": round(time.time(), 3), **_averages(groups, metrics)}
    line[f"{split}/reward"] = line["reward"]  # the name in ART's history
    if split != TRAIN_SPLIT:
        _send_scores(connection, split, line, metrics)
    if folder is not None:
        try:
            texts = _group_lines(groups, connection.api_key)
            _write(folder, f"{split}-{step:06d}.jsonl", texts, line)
        except OSError as error:  # a full disk, which must not end a training
            _log(f"not kept in {folder}: {error}")
    return Logged(line, folder)


def send_score(connection: Connection, validation: Validation) -> None:
    """See `Session.validated`."""
    connection.request("POST", "/slipway/validations", validation.model_dump_json().encode())


def _as_groups(given: Any) -> Iterator[Any]:
    """Groups as they are; trajectories by themselves, or one of them, as one group."""
    if get_field(given, "trajectories") is not None:
        yield given
        return
    given = [given] if get_field(given, "messages_and_choices") is not None else given
    alone: list[Any] = []
    for one in [] if given is None else given:
        if get_field(one, "trajectories") is not None:
            yield one
        else:
            alone.append(one)
    if alone:
        failed = [Raised.of(it) for it in alone if isinstance(it, BaseException)]
        others = [it for it in alone if not isinstance(it, BaseException)]
        yield {"trajectories": others, "exceptions": failed}


def _averages(groups: list[Any], metrics: Mapping[str, float]) -> dict[str, Any]:
    """The averages. A group is one example: its trajectories are tries of the same task."""
    averages: defaultdict[str, list[float]] = defaultdict(list)
    scores: list[float] = []
    without_reward = trajectories = 0
    raised: Counter[str] = Counter()
    for group in groups:
        raised.update(map(exception_reason, get_field(group, "exceptions") or ()))
        rewards = [to_float(get_field(one, "reward")) for one in get_field(group, "trajectories")]
        finite = [it for it in rewards if it is not None and math.isfinite(it)]
        trajectories += len(rewards)
        without_reward += len(rewards) - len(finite)
        scores += finite if len(groups) == 1 else [fmean(finite)] if finite else []
        for one in get_field(group, "trajectories"):
            for name, value in (get_field(one, "metrics") or {}).items():
                if (number := to_float(value)) is not None:
                    averages[name].append(number)
    return {
        "groups": len(groups),
        "trajectories": trajectories,
        "without_reward": without_reward,
        "exceptions": dict(raised),
        "reward": fmean(scores) if scores else None,
        "standard_error": standard_error.of_mean(scores) if len(scores) > 1 else None,
        "examples": len(scores),
        "metrics": {name: fmean(values) for name, values in averages.items()} | dict(metrics),
    }


def _newest_version(groups: list[Any]) -> int | None:
    versions = [
        version_of(choice)
        for group in groups
        for one in get_field(group, "trajectories")
        for choice in choices_of(one)
    ]
    return max((it for it in versions if it is not None), default=None)


def _send_scores(
    connection: Connection, split: str, line: Mapping[str, Any], metrics: Mapping[str, float]
) -> None:
    """Send the scores to the run: those of `val` by their own names, those of any other split with its name
    in front."""
    step = line["step"]
    scores = (
        {} if line["reward"] is None else {"score" if split == VALIDATION_SPLIT else split: line["reward"]}
    )
    prefix = "" if split == VALIDATION_SPLIT else f"{split}."
    scores |= {re.sub(r"[^\w.-]", "-", f"{prefix}{name}")[:64]: float(it) for name, it in metrics.items()}
    for place, (name, score) in enumerate(scores.items()):
        if not math.isfinite(score):
            _log(f"{name} of step {step} is {score}: no score")
            continue
        own = {} if place or line["reward"] is None else _score_precision(line)
        try:
            send_score(connection, Validation(step=step, name=name, score=score, version=step, **own))
        except Refused as error:
            _log(f"the run does not keep {name} of step {step}: {error.why}")


def _score_precision(line: Mapping[str, Any]) -> dict[str, Any]:
    return {"standard_error": line["standard_error"], "examples": line["examples"]}


def _group_lines(groups: list[Any], key: str) -> bytes:
    """A line for each group. A traceback may quote the run's own key: it is in none of them."""
    lines = b"".join(_json(group) for group in groups)
    return lines.replace(key.encode(), b"***") if key else lines


def _write(folder: Path, name: str, texts: bytes, line: Mapping[str, Any]) -> None:
    """Write the texts first, whole or not at all; then the line that refers to them."""
    if texts:
        (folder / TRAJECTORIES_FOLDER).mkdir(parents=True, exist_ok=True)
        partial = folder / TRAJECTORIES_FOLDER / f".{name}.{os.getpid()}"
        partial.write_bytes(texts)
        partial.replace(folder / TRAJECTORIES_FOLDER / name)
    with (folder / HISTORY_FILE).open("ab") as history:
        history.write(_json(line))


def _json(thing: Any) -> bytes:
    return to_json(thing, inf_nan_mode="null", serialize_unknown=True) + b"\n"


def _log(text: str) -> None:
    sys.stderr.write(f"slipway: log: {sanitized(text)}\n")
    sys.stderr.flush()
