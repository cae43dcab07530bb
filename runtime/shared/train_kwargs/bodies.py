"""The bodies of `POST /slipway/train_kwargs`: a program's trainer keywords, and their meaning here.

Neighbours: `table.py` makes the answer; `launcher/client/train_kwargs.py` has the client's copy, which a test
compares with this. pydantic only.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from runtime.shared.schema import Answer, Body, StepSettings

# The trainer that the keywords are from: a name may mean one thing with TRL and Arbor, and another with ART.
Trainer = Literal["trl", "art"]


class TrainKwargsRequest(Body):
    """The keywords, as plain JSON. `strict`: an unknown one is refused, else noted. `steps`: the number of
    steps, which a falling learning rate, and a warm-up by ratio, need."""

    train_kwargs: dict[str, Any]
    strict: bool = False
    steps: int | None = Field(default=None, ge=1)
    trainer: Trainer = "trl"


class Refusal(Answer):
    """A keyword that this run cannot follow: why, and with which options of `launch` a run could, if any."""

    key: str
    why: str
    launch: str = ""


class TrainKwargsResponse(Answer):
    """`settings` go with every step, `sampling` with every request; each note is shown once. If anything
    is refused, nothing should be trained."""

    settings: StepSettings = StepSettings()
    sampling: dict[str, Any] = {}
    notes: list[str] = []
    refusals: list[Refusal] = []
