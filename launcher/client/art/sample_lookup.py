"""Finds choices without a sample's name by their text: another model's, or those that a library has rebuilt.

ART's own `convert_litellm_choice_to_openai` keeps the text of a choice and nothing else. The run looks it up
among its own answers (`POST /slipway/samples/lookup`); an unknown text is another model's.
Neighbours: `art_training.py` asks before each step; `trajectories/members.py` reads choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from launcher.client.art.run_requests import post
from launcher.client.session import Session
from launcher.client.trajectories.members import get_field, histories_of, is_choice, sample_of


def look_up_samples(session: Session, trajectory_groups: Sequence[Any]) -> dict[int, str]:
    """The sample of each nameless choice that the run has served, by the choice's `id()`. Raises Refused.

    No request is made if every choice has its name.
    """
    histories = [*_histories(trajectory_groups)]
    unnamed = [history for history in histories if any(map(_has_no_sample, history))]
    if not unnamed:
        return {}
    choices = [entry for history in histories for entry in history if is_choice(entry)]
    named = [name for name in map(sample_of, choices) if name is not None]
    body = {"conversations": [*map(_conversation, unnamed)], "named": named}
    found = post(session, "/slipway/samples/lookup", body)["samples"]
    return {
        id(choice): sample
        for history, samples in zip(unnamed, found, strict=True)
        for choice, sample in zip(filter(_has_no_sample, history), samples, strict=True)
        if sample is not None
    }


def _histories(trajectory_groups: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for group in trajectory_groups:
        for trajectory in get_field(group, "trajectories") or ():
            yield from histories_of(trajectory)


def _has_no_sample(entry: Any) -> bool:
    return is_choice(entry) and sample_of(entry) is None


def _conversation(history: Sequence[Any]) -> dict[str, Any]:
    """A history as the run reads it: messages, and the places of the answers to look up."""
    return {
        "messages": [get_field(entry, "message") if is_choice(entry) else entry for entry in history],
        "answers": [place for place, entry in enumerate(history) if _has_no_sample(entry)],
    }
