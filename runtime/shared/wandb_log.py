"""Logs a run to Weights & Biases: each committed step, each validation and, if enabled, rollout texts.

The rows are those of `tracker_rows.py`, with texts as the table `train/completions`. Their axes are
train/step, and val/step, which is the version that was scored: wandb's own steps only ever go up, and a
validation comes between two of ours, from another process. Neighbours: the recipe calls; `validations.py` and
the gateway's `rollout_log.py` have the files that are read here. Knows nothing of training.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime.shared import json_files, tracker_rows, validations
from runtime.shared.redaction import HIDDEN, hide
from runtime.shared.wandb_signals import CLOSE, OPEN

_WANDB_SECONDS = 30.0
# Of a text in the table; the files at home have more of it.
_CHARACTERS = 2_000
_COLUMNS = ("step", "group", "predictor", "reward", "prompt", "completion", "dropped")
_OWN_SECRETS = ("WANDB_API_KEY", "HF_TOKEN")
_log = logging.getLogger(__name__)


class WandbLog:
    """The run on Weights & Biases; offline runs lie in `logs` until `wandb sync`.

    The run's id is ours, so a resumed run goes on in the same one. A service that cannot be reached at the
    start costs the live page, not the training: the run is then kept offline, and the log reports it. It ends
    with the trainer, or as soon as the file CLOSE is there. `name`: the run's name for people. `output`: the
    run's folder. `committed`: its newest step. `num_completions`: the number shown for each step.
    `is_rank_zero`: whether this is the first of the trainer's processes; the others log nothing, and do not
    handle OPEN and CLOSE.
    """

    def __init__(
        self,
        mode: str,
        project: str,
        run_id: str,
        output: Path,
        config: dict[str, Any],
        committed: int = 0,
        num_completions: int = 0,
        name: str | None = None,
        is_rank_zero: bool = True,
    ) -> None:
        self._run: Any = None
        if not is_rank_zero:
            return
        self._open, self._close = output / OPEN, output / CLOSE
        for left in (self._open, self._close):
            left.unlink(missing_ok=True)
        if mode == "disabled":
            return
        import wandb

        # wandb goes elsewhere, unasked, where its folder is not there.
        folder = output / "logs"
        folder.mkdir(parents=True, exist_ok=True)

        def start(mode: Any) -> Any:
            return wandb.init(
                project=project,
                id=run_id,
                name=name or run_id,
                dir=folder,
                mode=mode,
                resume="allow",
                config=config,
                # The log is the supervisor's, and the folder is no checkout of the user's work.
                settings=wandb.Settings(
                    console="off", silent=True, disable_git=True, init_timeout=_WANDB_SECONDS
                ),
            )

        try:
            run = start(mode)
        except wandb.Error as error:
            if mode == "offline":
                raise
            _log.warning("Weights & Biases refused (%s); the run is kept offline in %s", error, folder)
            run = start("offline")
        self._run = run
        self._table, self._completions, self._output = wandb.Table, num_completions, output
        self._validations = _UnloggedValidations(output, committed)
        for kind in ("train", "val"):
            run.define_metric(f"{kind}/step")
            run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")
        run.define_metric("counts/*", step_metric="train/step")
        self._open.touch()

    def append(self, line: dict[str, Any], *, maybe_logged: bool = False) -> None:
        """Log one step's numbers; `maybe_logged`: an earlier life may have logged them."""
        if self._run is None or (maybe_logged and self._run.summary.get("train/step") == line["step"]):
            return
        self._validated()
        row = tracker_rows.step_row(line)
        if self._completions and (rows := list(self._completions_table(line["step"]))):
            row["train/completions"] = self._table(columns=list(_COLUMNS), data=rows)
        self._run.log(row)

    def log_new_validations(self) -> None:
        """Log new validations; called often, and cheap if there are none."""
        if self._run is None:
            return
        self._validated()
        if self._close.exists():
            self.close()

    def close(self) -> None:
        """Flush and end; nothing is logged after it."""
        if self._run is None:
            return
        self._validated()
        self._run.finish()
        self._run = None
        self._open.unlink(missing_ok=True)

    def _validated(self) -> None:
        for line in self._validations.take():
            self._run.log(tracker_rows.validation_row(line))
            self._validations.logged(line)

    def _completions_table(self, step: int) -> Iterator[list[Any]]:
        """The first texts of a step, as `rollout_log.py` has written them."""
        try:
            texts = (self._output / "logs" / "rollouts" / f"step-{step:06d}.jsonl").read_text().splitlines()
        except OSError:
            return
        for text in texts[: self._completions]:
            try:
                record = json.loads(text)
            except ValueError:
                continue
            yield [_table_cell(name, record.get(name)) for name in _COLUMNS]


def _table_cell(name: str, value: Any) -> Any:
    """A value as a cell of the table. A prompt keeps its end, which tells most. Secrets are hidden before it
    is cut."""
    if not isinstance(value, str):
        return value
    for secret in _OWN_SECRETS:
        if given := os.environ.get(secret):
            value = value.replace(given, HIDDEN)
    value = hide(value)
    return value[-_CHARACTERS:] if name == "prompt" else value[:_CHARACTERS]


class _UnloggedValidations:
    """The validations that no life of this run has logged; the logged ones are remembered beside their file.

    A machine that begins anew remembers none: all scores from before its newest step count as logged.
    """

    def __init__(self, output: Path, committed: int) -> None:
        self._path = output / validations.FILE
        self._memory = output / "wandb_validations.json"
        remembered = None
        try:
            remembered = json_files.read_json(self._memory)
        except (OSError, ValueError):
            _log.warning("%s cannot be read: it is begun anew", self._memory.name)
        if isinstance(remembered, list):
            self._logged = [str(it) for it in remembered]
        else:
            self._logged = [
                _mark(it) for it in validations.read(self._path) if (it.get("version") or 0) < committed
            ]
        self._known = set(self._logged)
        self._size = -1

    def take(self) -> list[dict[str, Any]]:
        try:
            size = self._path.stat().st_size
        except OSError:
            return []
        if size == self._size:
            return []
        self._size = size
        try:
            found = {_mark(line): line for line in validations.read(self._path)}
        except OSError as error:  # a failure to show must not hold up a step
            _log.warning("%s cannot be read: %s", self._path.name, error)
            return []
        return [line for mark, line in found.items() if mark not in self._known]

    def logged(self, line: dict[str, Any]) -> None:
        self._known.add(_mark(line))
        self._logged.append(_mark(line))
        try:
            json_files.write_json(self._memory, self._logged)
        except OSError as error:  # a full disk costs no step: one may be logged twice
            _log.warning("%s is not written: %s", self._memory.name, error)


def _mark(line: dict[str, Any]) -> str:
    return json.dumps([*validations.key_of(line), line.get("version"), line["score"]])
