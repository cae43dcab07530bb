"""The words that the embedded agent model learns from, from `words.toml`: labels, people, things, look-ups.

Neighbours: `tasks.py` and `episodes.py` make texts of them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_FILE = tomllib.loads((Path(__file__).parent / "words.toml").read_text())


class Label(NamedTuple):
    """One class of a set: what programs call it, and the words that give it away."""

    names: tuple[str, ...]
    cues: tuple[str, ...]


def _split(listed: str) -> tuple[str, ...]:
    return tuple(listed.replace("\n", " ").strip().split(", "))


def _labels(kind: str) -> dict[str, tuple[Label, ...]]:
    sets = _FILE[kind].items()
    return {name: tuple(Label(_split(it["names"]), _split(it["cues"])) for it in some) for name, some in sets}


# Labels whose cues are nouns, and those whose cues say how something is.
SUBJECTS, JUDGEMENTS = _labels("subjects"), _labels("judgements")
BARE_LABELS = tuple(map(_split, _FILE["bare_labels"]))
ABOUT, HOW = tuple(_FILE["about"]), tuple(_FILE["how"])
NAMES, SURNAMES, CITIES = _split(_FILE["names"]), _split(_FILE["surnames"]), _split(_FILE["cities"])
JOBS, DAYS, MONTHS = _split(_FILE["jobs"]), _split(_FILE["days"]), _split(_FILE["months"])
COLOURS, PRODUCTS, GOODS = _split(_FILE["colours"]), _split(_FILE["products"]), _split(_FILE["goods"])
TEXT_FIELDS, LABEL_FIELDS = _split(_FILE["text_fields"]), _split(_FILE["label_fields"])
COUNTRIES, NOUNS = _split(_FILE["countries"]), _split(_FILE["nouns"])
_TEENS = (
    "ten", "eleven", "twelve", "thirteen", "fourteen",
    "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", *_TEENS)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


class Lookup(NamedTuple):
    """A thing to look up: its tools, questions and sentences on it, its keys and their values."""

    names: tuple[str, ...]
    args: tuple[str, ...]
    descs: tuple[str, ...]
    questions: tuple[str, ...]
    sentence: str
    keys: tuple[str, ...]
    values: tuple[str, ...]


_RANGES = {
    "numbers": tuple(map(str, range(2, 100))),
    "phones": tuple(map(str, range(1200, 9990, 37))),
}


def _list_of(named: str) -> tuple[str, ...]:
    """A list by its name in the file, a range of numbers, or the words themselves."""
    return _RANGES.get(named) or _split(_FILE.get(named, named))


def _lookup(it: dict[str, Any]) -> Lookup:
    names, args, descs, questions = (tuple(it[name]) for name in ("names", "args", "descs", "questions"))
    keys, values = _list_of(it["keys"]), _list_of(it["values"])
    return Lookup(names, args, descs, questions, it["sentence"], keys, values)


LOOKUPS = {kind: _lookup(it) for kind, it in _FILE["lookups"].items()}


def in_words(number: int) -> str:
    """0 to 99 as English words."""
    if number < len(NUMBER_WORDS):
        return NUMBER_WORDS[number]
    tens, ones = divmod(number, 10)
    return TENS[tens - 2] + (f"-{NUMBER_WORDS[ones]}" if ones else "")


def kinds() -> Iterator[tuple[str, ...]]:
    """Words of one kind: names, cities, …; of each label its names and cues; all labels; all cues."""
    yield from (NAMES, SURNAMES, CITIES, JOBS, DAYS, MONTHS, COLOURS, PRODUCTS, GOODS, COUNTRIES, NOUNS)
    yield (*NUMBER_WORDS, *TENS)
    labels = [label for some in (SUBJECTS, JUDGEMENTS) for made in some.values() for label in made]
    yield from ((*label.names, *label.cues) for label in labels)
    yield tuple(name for label in labels for name in label.names)
    yield tuple(cue for label in labels for cue in label.cues)
