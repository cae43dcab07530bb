"""Programs written by hand, as a user who does not know how the embedded agent model was taught.

Neighbours: `figures.py` measures the model on them, beside draws of its own tasks. No text
here is of `words.toml`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import dspy


class RouteTicket(dspy.Signature):
    """Route the customer's message to the right team."""

    message: str = dspy.InputField()
    team: Literal["billing", "shipping", "technical"] = dspy.OutputField()


class RateReview(dspy.Signature):
    """Is the review positive or negative?"""

    review: str = dspy.InputField()
    label: Literal["positive", "negative"] = dspy.OutputField()


class FindPerson(dspy.Signature):
    """Extract the person and the city from the sentence."""

    sentence: str = dspy.InputField()
    person: str = dspy.OutputField()
    city: str = dspy.OutputField()


@dataclass(frozen=True)
class HandWritten:
    """A program's signature and its examples: inputs, then outputs."""

    signature: Any
    inputs: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def examples(self) -> list[dspy.Example]:
        """As DSPy has them."""
        predict: Any = dspy.Predict(self.signature)
        names = [*predict.signature.fields]
        rows = [dict(zip(names, row, strict=True)) for row in self.rows]
        return [dspy.Example(**row).with_inputs(*self.inputs) for row in rows]


PROGRAMS = {
    "route": HandWritten(
        RouteTicket,
        ("message",),
        (
            ("My invoice is wrong, you charged me twice.", "billing"),
            ("I want a refund for last month's payment.", "billing"),
            ("The payment with my credit card was refused.", "billing"),
            ("Why is there a second fee on my bill?", "billing"),
            ("The parcel has not arrived yet.", "shipping"),
            ("Where is my package? The tracking says nothing.", "shipping"),
            ("The delivery came to the wrong address.", "shipping"),
            ("The courier left the box in the rain.", "shipping"),
            ("The app crashes when I open the settings.", "technical"),
            ("I get an error message and the screen is blank.", "technical"),
            ("After the update I can't log in any more.", "technical"),
            ("The website does not load in my browser.", "technical"),
        ),
    ),
    "review": HandWritten(
        RateReview,
        ("review",),
        (
            ("What a wonderful evening, we loved every minute.", "positive"),
            ("The food was excellent and the waiter friendly.", "positive"),
            ("Great value, I would buy it again.", "positive"),
            ("A beautiful room with a perfect view.", "positive"),
            ("Very happy with this lamp.", "positive"),
            ("Terrible service, we waited for an hour.", "negative"),
            ("It broke after two days, what a waste of money.", "negative"),
            ("The worst hotel I have ever seen.", "negative"),
            ("The soup was cold and the room dirty.", "negative"),
            ("I am disappointed, never again.", "negative"),
        ),
    ),
    "person": HandWritten(
        FindPerson,
        ("sentence",),
        (
            ("Anna moved to Berlin in spring.", "Anna", "Berlin"),
            ("In Rome Peter opened a bakery.", "Peter", "Rome"),
            ("My neighbour Tom was born in Madrid.", "Tom", "Madrid"),
            ("Last week Laura drove from home to Paris.", "Laura", "Paris"),
            ("A letter for David came from Vienna.", "David", "Vienna"),
            ("Emma teaches music in Oslo.", "Emma", "Oslo"),
            ("London is where Paul works now.", "Paul", "London"),
            ("Next year Nina wants to study in Prague.", "Nina", "Prague"),
        ),
    ),
    "question": HandWritten(
        "passage, question -> answer",
        ("passage", "question"),
        (
            ("Anna lives in Berlin. Tom lives in Rome.", "Where does Tom live?", "Rome"),
            ("Tom is a teacher and Anna is a doctor.", "What is the job of Anna?", "doctor"),
            ("Paul is 41 years old. His son is 12.", "How old is Paul?", "41"),
            ("Emma comes from Spain, Nina from Norway.", "Where does Nina come from?", "Norway"),
            ("David bought a lamp and Laura a chair.", "What did Laura buy?", "chair"),
            ("Peter was born in May. Anna was born in June.", "When was Peter born?", "May"),
        ),
    ),
    "sum": HandWritten(
        "question -> answer: int",
        ("question",),
        (
            ("Tom has three apples and finds four more. How many has he?", "7"),
            ("What is nine minus five?", "4"),
            ("There are 6 eggs in a box. How many eggs are in two boxes?", "12"),
            ("Anna has 10 coins and loses 3. How many are left?", "7"),
            ("What is 4 times 5?", "20"),
            ("A pen costs 2 euros. What do 8 pens cost?", "16"),
        ),
    ),
}  # fmt: skip


def is_right(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> bool:
    """Whether each output is the example's, without regard to case and a full stop."""

    def plain(value: object) -> str:
        return str(value).strip().strip(".").lower()

    return all(plain(prediction.get(name)) == plain(value) for name, value in example.labels().items())
