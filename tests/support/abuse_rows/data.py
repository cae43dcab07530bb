"""What is given as examples to train and to validate on."""

from __future__ import annotations

import dspy

from tests.support.abuse_rows.row import ALL, Abuse, tagged_examples

DATA = [
    Abuse("an empty trainset", trainset=list, says="the trainset is empty", error=ValueError, exit=6),
    Abuse(
        "dicts instead of examples",
        trainset=lambda: [{"english": "hi"}],
        says=r"trainset\[0\] is a dict, not a dspy.Example",
        error=TypeError,
        exit=6,
    ),
    Abuse(
        "examples without inputs",
        trainset=lambda: [dspy.Example(english="hi")],
        says=r"trainset\[0\] does not say which fields are inputs",
        error=ValueError,
        exit=6,
    ),
    Abuse(
        "examples whose inputs they do not have",
        trainset=lambda: [dspy.Example(english="hi").with_inputs("englisch")],
        says=r"trainset\[0\] has no input",
        error=ValueError,
        exit=6,
    ),
    Abuse(
        "no list at all", trainset=lambda: 5, says="must be a list of dspy.Example", error=TypeError, exit=6
    ),
    Abuse("a generator", trainset=lambda: (it for it in tagged_examples()), outcomes=ALL),
    Abuse(
        "one example where a step takes two: two groups of it",
        trainset=lambda: tagged_examples()[:1],
        says="a step takes 2 examples and the trainset has 1",
        outcomes=ALL,
        counts={"groups": 2},
    ),
    Abuse(
        "the same example twice",
        trainset=lambda: tagged_examples()[:1] * 2,
        says="1 of the 2 training examples are in the trainset more than once",
        outcomes=ALL,
    ),
    Abuse(
        "a valset that is the trainset",
        trainset=tagged_examples,
        valset=tagged_examples,
        says="2 of the 2 validation examples are training examples too",
        outcomes=ALL,
    ),
    Abuse("an empty valset: nothing is validated", valset=list, outcomes=ALL),
]
