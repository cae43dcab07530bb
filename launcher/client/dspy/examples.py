"""The examples an optimizer is given: checks them before any request, with warnings.

Neighbours: `grpo.py` and `validation.py` check theirs here, `sampler.py` chooses a step's. Knows nothing of
programs or of training.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import dspy

from launcher.client.dspy.sampler import EpochSampler


@dataclass(frozen=True)
class TrainingData:
    """The examples of one `compile`: those that its steps roll out, in the sampler's order, and the held-out
    ones."""

    trainset: Sequence[dspy.Example]
    held_out: Sequence[dspy.Example]
    sampler: EpochSampler


def check_examples(name: str, items: Iterable[Any] | None) -> list[dspy.Example]:
    """`items` as a list of examples with inputs. Raises TypeError or ValueError, with the place and a fix."""
    try:
        examples = list(items or ())
    except TypeError:
        raise TypeError(f"the {name} must be a list of dspy.Example, not {type(items).__name__}") from None
    for place, example in enumerate(examples):
        if not isinstance(example, dspy.Example):
            raise TypeError(
                f"{name}[{place}] is {_type_name(example)}, not a dspy.Example: "
                "dspy.Example(**fields).with_inputs('question')"
            )
        try:
            inputs = example.inputs()
        except ValueError:
            raise ValueError(
                f"{name}[{place}] does not say which fields are inputs: call .with_inputs('question') on it"
            ) from None
        if not len(inputs):
            raise ValueError(f"{name}[{place}] has no input: with_inputs() named no field that it has")
    return examples


def example_warnings(trainset: list[dspy.Example], valset: list[dspy.Example], per_step: int) -> list[str]:
    """Warnings for examples that are allowed and yet seldom intended."""
    notes = []
    if per_step > len(trainset):
        notes.append(
            f"a step takes {per_step} examples and the trainset has {len(trainset)}: "
            "each step takes some of them more than once, as separate groups"
        )
    train = [hash(repr(it)) for it in trainset]  # fields may be lists, and images are long
    twice = len(train) - len(set(train))
    if twice:
        notes.append(f"{twice} of the {len(train)} training examples are in the trainset more than once")
    known = set(train)
    shared = sum(hash(repr(it)) in known for it in valset)
    if shared:
        notes.append(
            f"{shared} of the {len(valset)} validation examples are training examples too: "
            "the validation cannot show whether the policy only memorizes them"
        )
    return notes


def _type_name(value: Any) -> str:
    return f"a {type(value).__name__}"
