"""What a trainer's keywords mean on this run, as the run says it: `train_kwargs` of DSPy's weight optimizers.

Neighbours: `training_job.py` and `reinforce_job.py` ask; the runtime's `train_kwargs.py` has the one table.
What says how much is trained, and not how, is taken out here: it belongs to whoever makes the steps.
Knows nothing of DSPy, steps or examples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.client.bodies import REQUEST_HEADER, StepSettings
from launcher.client.failures import Refused, TrainingFailed
from launcher.client.session import Session
from launcher.client.wire import new_request_id

_PATH = "/slipway/train_kwargs"
# What DSPy itself adds, and what the jobs here read themselves.
_NOT_ASKED = frozenset(
    {
        "num_generations",
        "num_train_epochs",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "max_steps",
        "seed",
    }
)


@dataclass(frozen=True)
class Meant:
    """What each step does otherwise than the run, and how is sampled for it."""

    settings: StepSettings | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def at(self, step: int, steps: int | None = None) -> StepSettings | None:
        """The settings of step `step`, from 0, of `steps`: its place counts in a schedule of its own."""
        said = self.settings
        if said is None or (said.schedule is None and said.warmup_steps is None):
            return said
        falls = said.schedule in ("linear", "cosine")
        length = said.schedule_steps or (steps if falls else None)
        return said.model_copy(update={"schedule_step": step, "schedule_steps": length})


def meant(
    session: Session, train_kwargs: Mapping[str, Any], say: Callable[[str], Any], steps: int | None = None
) -> Meant:
    """Ask the run; each note is said. `steps`: how many there will be, where that is known.

    Raises TrainingFailed where the run would have to be another one.
    """
    asked = {name: value for name, value in train_kwargs.items() if name not in _NOT_ASKED}
    if not asked:
        return Meant()
    try:
        body = json.dumps({"train_kwargs": asked} | ({} if steps is None else {"steps": steps})).encode()
    except TypeError as error:
        raise TrainingFailed(
            "train_kwargs cannot be sent to the run", str(error), "give plain numbers, texts, lists and dicts"
        ) from None
    headers = {REQUEST_HEADER: new_request_id(), "content-type": "application/json"}
    response = session.wire.send("POST", _PATH, body, headers)
    if response.is_error:
        raise Refused(
            "The run does not say what train_kwargs mean", response.status_code, why=response.text[:300]
        )
    answer = response.json()
    if refusals := answer.get("refusals"):
        said = "; ".join(f"{it['key']}: {it['why']}" for it in refusals)
        launch = " ".join(dict.fromkeys(it["launch"] for it in refusals if it.get("launch")))
        hint = f"`launch {launch} -- …` starts one that does" if launch else None
        raise TrainingFailed("This run cannot train with these train_kwargs", said, hint)
    for note in answer.get("notes", []):
        say(f"train_kwargs: {note}")
    settings = StepSettings.model_validate(answer.get("settings") or {})
    return Meant(settings if settings != StepSettings() else None, answer.get("sampling") or {})
