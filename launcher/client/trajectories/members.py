"""Makes the members of a group from trajectories: each one's own answers are trained, the rest is counted.

    made, dropped = group_of(trajectories, "scenario-7")

Takes any object with the fields: our Trajectory, that of openpipe-art, or the JSON of either. Neighbours:
`train_groups.py` and the adapters of other libraries' groups ask here. Knows nothing of a session or of HTTP.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from launcher.client.groups import finite
from launcher.client.request_bodies import Group, Member

# In the history, but nothing that this run sampled: a judge's turn, another model's.
OTHER_MODEL = "answer of another model"
# A trajectory with no answer at all: nothing was sampled, so nothing of it can be learnt.
NO_ANSWER = "no answer in its trajectory"
# The gateway's own reason for two members that name one sample.
NAMED_TWICE = "named twice"
NO_REWARD = "no reward"
# Of a reason.
MAX_REASON_CHARACTERS = 80


def group_of(
    trajectories: Any,
    id: str,  # noqa: A002 - the group's own
    found: Mapping[int, str] = MappingProxyType({}),
) -> tuple[Group | None, Counter[str]]:
    """The group that trains these trajectories, and the counts of the parts that it leaves out, by reason.

    `trajectories`: some trajectories, or a group of them with its `exceptions`. Each is one member, by the
    samples that its choices carry (`choice.slipway`), those of `additional_histories` behind its own; or by
    its `rollout` if it names one; `found` has the samples of choices that carry none, by `id(choice)`. The
    group is None if nothing is left to train. Each part of a trajectory is in the group once, or counted
    once: a choice of another model, a choice that stands in it twice, a trajectory without a choice, an
    exception.
    """
    dropped = Counter(exception_reason(one) for one in get_field(trajectories, "exceptions") or ())
    members: list[Member] = []
    for trajectory in _members_of(trajectories):
        if isinstance(trajectory, BaseException):
            dropped[exception_reason(trajectory)] += 1
            continue
        made, left_out = _member(trajectory, found)
        dropped += left_out
        members += [made] if made is not None else []
    return (Group(id=id, members=members) if members else None), dropped


def choices_of(trajectory: Any) -> Iterator[Any]:
    """Every choice of a trajectory, in order: its own history's, then those of `additional_histories`."""
    for history in histories_of(trajectory):
        yield from filter(is_choice, history)


def histories_of(trajectory: Any) -> Iterator[Sequence[Any]]:
    """The entries of its own history, then those of each of `additional_histories`."""
    for history in (trajectory, *(get_field(trajectory, "additional_histories") or ())):
        yield get_field(history, "messages_and_choices") or ()


def is_choice(entry: Any) -> bool:
    """Whether an entry of a history is an answer from a client, and no written message."""
    if isinstance(entry, Mapping):
        return isinstance(entry.get("message"), Mapping) or hasattr(entry.get("message"), "content")
    return hasattr(entry, "message") and hasattr(entry, "finish_reason")


def sample_of(choice: Any) -> str | None:
    """The id of the sample that a choice is; None for one that this run did not make."""
    sample = _slipway_field(choice, "sample")
    return sample if isinstance(sample, str) and sample else None


def version_of(choice: Any) -> int | None:
    """The policy version that a choice was sampled from; None for another model's."""
    version = _slipway_field(choice, "version")
    return version if isinstance(version, int) else None


def get_field(thing: Any, name: str) -> Any:
    """A field of an object or of its JSON; None if it is missing."""
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def _slipway_field(choice: Any, name: str) -> Any:
    """A field that the gateway added to a choice; LiteLLM keeps it among the fields that it does not know."""
    tags = get_field(choice, "slipway") or get_field(get_field(choice, "provider_specific_fields"), "slipway")
    return get_field(tags, name)


def _members_of(trajectories: Any) -> Iterable[Any]:
    """The trajectories of a group, of its JSON, or as they are."""
    listed = get_field(trajectories, "trajectories")
    return trajectories if listed is None else listed


def _member(trajectory: Any, found: Mapping[int, str]) -> tuple[Member | None, Counter[str]]:
    dropped: Counter[str] = Counter()
    reward = to_float(get_field(trajectory, "reward"))
    rewarded: dict[str, Any] = {"reward": reward, "failure": NO_REWARD if reward is None else None}
    rewarded["metrics"] = finite(get_field(trajectory, "metrics") or {})
    if rollout := get_field(trajectory, "rollout"):
        return Member(rollout=rollout, **rewarded), dropped
    samples: dict[str, None] = {}
    choices = 0
    for choice in choices_of(trajectory):
        choices += 1
        sample = sample_of(choice) or found.get(id(choice))
        if sample is None:
            dropped[OTHER_MODEL] += 1
        elif sample in samples:
            dropped[NAMED_TWICE] += 1
        else:
            samples[sample] = None
    if not choices:
        dropped[NO_ANSWER] += 1
    return (Member(samples=[*samples], **rewarded) if samples else None), dropped


def to_float(reward: Any) -> float | None:
    """A reward as a number, also one that is not finite: the run counts it. None for a value that is no
    number."""
    try:
        return float(reward)
    except (TypeError, ValueError):
        return None


def exception_reason(exception: Any) -> str:
    """An exception by its type, as text such as `<class 'builtins.ValueError'>` has it too."""
    type_text = get_field(exception, "type")
    words = re.findall(r"\w+", type_text) if isinstance(type_text, str) else [type(exception).__name__]
    return f"raised {words[-1] if words else 'an error'}"[:MAX_REASON_CHARACTERS]
