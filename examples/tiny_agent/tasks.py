"""Tasks that the embedded agent model knows: labels, short extraction, questions on a text, sums in words.

A task is what a DSPy program asks: fields, an instruction, and cases with right answers. Neighbours:
`prompts.py` writes them in DSPy's formats. Knows nothing of prompts or models.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from examples.tiny_agent import words


@dataclass(frozen=True)
class Field:
    """A field of a program's signature."""

    name: str
    desc: str = ""
    choices: tuple[str, ...] = ()
    """The only values that it takes, if the program says so by its type."""
    number: bool = False


@dataclass(frozen=True)
class Case:
    """The inputs and right outputs of one example."""

    inputs: dict[str, str]
    outputs: dict[str, str]
    reasoning: str
    guesses: dict[str, tuple[str, ...]]
    """For each output the values that one who does not look closely answers with."""


@dataclass(frozen=True)
class Task:
    """What one program asks, and a source of its cases."""

    kind: str
    instruction: str
    inputs: tuple[Field, ...]
    outputs: tuple[Field, ...]
    draw: Callable[[random.Random], Case]
    told: bool = True
    """Whether the prompt says what is asked, so that it can be answered without examples."""


# Sentences that an instruction may end with.
CAREFUL = (
    "Think carefully before you answer.",
    "Read each word with care.",
    "Read the text twice and look at every word.",
    "Be precise and check your answer.",
    "Work step by step and check the result.",
    "Look for the words that decide it.",
    "Do not guess: find the words that prove the answer.",
    "Pay close attention to the details.",
    "Accuracy matters most: verify the answer before you give it.",
    "Take your time and reason about the text first.",
)
NEUTRAL = (
    "Answer briefly.",
    "You are a helpful assistant.",
    "Be polite.",
    "Be concise.",
    "Use simple language.",
    "You are an expert.",
    "Give the answer only.",
    "Write nothing else.",
    "Your answer will be read by a customer.",
    "This is important.",
)

SET_NAMES = {
    "support": ("team", "department", "queue", "category", "intent", "desk"),
    "topic": ("topic", "subject", "area", "category", "section"),
    "thing": ("kind", "category", "group", "class_name"),
    "sentiment": ("sentiment", "mood", "label", "opinion", "polarity", "feeling"),
    "urgency": ("urgency", "priority", "level"),
}


def any_task(rng: random.Random) -> Task:
    """One task of any kind."""
    made = rng.choices((label_task, extraction_task, question_task, sum_task), (45, 25, 12, 18))[0]
    return made(rng)


def _instruction(rng: random.Random, forms: tuple[str, ...], **names: str) -> str:
    """One of the forms; "" leaves DSPy's own; now and then with a sentence more, before or after."""
    said = rng.choice(forms).format(**names)
    extra = rng.random()
    if extra < 0.22:
        return (
            f"{said} {rng.choice(CAREFUL)}".strip() if rng.random() < 0.8 else f"{rng.choice(CAREFUL)} {said}"
        )
    if extra < 0.35:
        return (
            f"{said} {rng.choice(NEUTRAL)}".strip() if rng.random() < 0.7 else f"{rng.choice(NEUTRAL)} {said}"
        )
    return said


# --- labels


def label_task(rng: random.Random) -> Task:
    """Texts of two to five classes. The prompt names them by type, description, instruction or examples."""
    by_subject = rng.random() < 0.72
    sets = words.SUBJECTS if by_subject else words.JUDGEMENTS
    set_name = rng.choice([*sets])
    classes = rng.sample(sets[set_name], rng.randint(2, min(5, len(sets[set_name]))))
    first_names = rng.random() < 0.4
    labels = [it.names[0] if first_names else rng.choice(it.names) for it in classes]
    source = rng.choice(words.TEXT_FIELDS)
    target = rng.choice(words.LABEL_FIELDS if rng.random() < 0.6 else SET_NAMES[set_name])
    if target == source:
        target = "label"
    named = rng.choices(("type", "desc", "instruction", "examples"), (45, 20, 20, 15))[0]
    if named == "examples":
        labels = list(rng.choice(words.BARE_LABELS)[: len(classes)])
    style = rng.random()
    if style < 0.2:
        labels = [it.capitalize() for it in labels]
    elif style < 0.28:
        labels = [it.upper() for it in labels]
    elif style < 0.4:
        labels = [it.replace(" ", "_") for it in labels]
    if len({*labels}) < len(labels):
        return label_task(rng)
    listed = rng.choice((", ".join(labels), " or ".join(labels), f"{', '.join(labels[:-1])} or {labels[-1]}"))
    nice = target.strip("_").replace("_", " ")
    forms = (
        "",
        "",
        f"Classify the {source}.",
        f"Say which {nice} the {source} belongs to.",
        f"Choose the {nice} of the {source}.",
        f"Sort the {source} into a {nice}.",
        f"What is the {nice} of this {source}?",
        f"Read the {source} and name its {nice}.",
        f"Assign the right {nice} to each {source}.",
        f"Route the {source} to the right {nice}.",
        f"Decide the {nice}.",
    )
    if named == "instruction":
        forms = (
            f"Classify the {source} as {listed}.",
            f"Say which {nice} the {source} belongs to: {listed}.",
            f"Choose one of: {listed}.",
            f"Answer with one of {listed}.",
            f"The {nice} is one of {listed}.",
            f"Is the {source} {listed}?",
            f"Route the {source} to {listed}.",
        )
    desc = ""
    if named == "desc":
        desc = rng.choice((listed, f"one of {listed}", f"one of: {listed}", f"either {listed}"))
    elif rng.random() < 0.1:
        desc = f"the {nice} of the {source}"
    bare = named == "examples" and rng.random() < 0.3
    choices = tuple(labels) if named == "type" or bare else ()

    def draw(rng: random.Random) -> Case:
        number = rng.randrange(len(classes))
        text, cue = _labelled_text(rng, classes[number], by_subject)
        reasoning = rng.choice(
            (
                f"The {source} speaks of {cue}, so it is {labels[number]}.",
                f"It says {cue}. That is {labels[number]}.",
                f"The word {cue} decides: {labels[number]}.",
            )
        )
        return Case({source: text}, {target: labels[number]}, reasoning, {target: tuple(labels)})

    return Task(
        "label",
        _instruction(rng, forms),
        (Field(source),),
        (Field(target, desc, choices),),
        draw,
        told=named != "examples",
    )


def _labelled_text(rng: random.Random, label: words.Label, by_subject: bool) -> tuple[str, str]:
    """A text of this class and the word that gives it away."""
    cue, cue2 = rng.sample(label.cues, 2)
    noun, noun2 = rng.sample(words.NOUNS, 2)
    form = rng.choice(words.ABOUT if by_subject else words.HOW)
    text = _filled(rng, form, cue=cue, cue2=cue2, noun=noun, noun2=noun2)
    if rng.random() < 0.12:
        other = rng.choice(words.ABOUT if by_subject else words.HOW)
        text += " " + _filled(rng, other, cue=cue2, cue2=cue, noun=noun2, noun2=noun)
    if rng.random() < 0.1:
        text = text.lower()
    return text, cue


def _filled(rng: random.Random, form: str, **values: str) -> str:
    return form.format(
        name=rng.choice(words.NAMES), city=rng.choice(words.CITIES), day=rng.choice(words.DAYS), **values
    )


# --- extraction

WANTED = {
    "name": ("name", "person", "customer", "who", "first_name", "client", "sender"),
    "city": ("city", "town", "place", "location", "where"),
    "job": ("job", "profession", "occupation", "work"),
    "day": ("day", "weekday", "when", "date"),
    "product": ("product", "item", "object", "thing", "article"),
    "colour": ("colour", "color"),
    "amount": ("amount", "price", "cost", "total", "euros"),
    "age": ("age", "years"),
    "country": ("country", "nation", "origin"),
    "month": ("month", "birth_month"),
}
# What each sentence says of a person.
SAYINGS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("{name} lives in {city}.", ("name", "city")),
    ("{name} is a {job} in {city}.", ("name", "job", "city")),
    ("{name} works as a {job}.", ("name", "job")),
    ("{name} comes from {country}.", ("name", "country")),
    ("{name} is {age} years old.", ("name", "age")),
    ("{name}, {age}, comes from {country} and lives in {city}.", ("name", "age", "country", "city")),
    ("{name} bought a {colour} {product} for {amount} euros.", ("name", "colour", "product", "amount")),
    ("{name} ordered a {product} on {day}.", ("name", "product", "day")),
    ("The {product} costs {amount} euros.", ("product", "amount")),
    ("The {product} is {colour}.", ("product", "colour")),
    ("{name} flies to {city} on {day}.", ("name", "city", "day")),
    ("{name} was born in {month}.", ("name", "month")),
    ("My name is {name} and I live in {city}.", ("name", "city")),
    ("On {day} {name} sold a {product} in {city}.", ("day", "name", "product", "city")),
    ("I paid {amount} euros for the {colour} {product}. {name}", ("amount", "colour", "product", "name")),
    ("The train to {city} leaves on {day}.", ("city", "day")),
    ("Please send the {product} to {name} in {city} before {day}.", ("product", "name", "city", "day")),
    ("{name} met a {job} from {country} in {month}.", ("name", "job", "country", "month")),
)


def _person(rng: random.Random) -> dict[str, str]:
    name = rng.choice(words.NAMES)
    return {
        "name": f"{name} {rng.choice(words.SURNAMES)}" if rng.random() < 0.35 else name,
        "city": rng.choice(words.CITIES),
        "job": rng.choice(words.JOBS),
        "day": rng.choice(words.DAYS),
        "product": rng.choice(words.PRODUCTS),
        "colour": rng.choice(words.COLOURS),
        "amount": str(rng.randint(2, 99) * rng.choice((1, 1, 1, 10))),
        "age": str(rng.randint(18, 90)),
        "country": rng.choice(words.COUNTRIES),
        "month": rng.choice(words.MONTHS),
    }


LISTS = {
    "city": words.CITIES,
    "job": words.JOBS,
    "day": words.DAYS,
    "product": words.PRODUCTS,
    "colour": words.COLOURS,
    "country": words.COUNTRIES,
    "month": words.MONTHS,
    "name": words.NAMES,
}


def _others(rng: random.Random, wanted: str, person: dict[str, str]) -> tuple[str, ...]:
    """Plausible wrong answers: another of its kind, another word of the text."""
    if wanted in LISTS:
        return (*rng.sample(LISTS[wanted], 2), person["name"])
    return (str(rng.randint(2, 99)), str(rng.randint(2, 99)), person["product"])


def extraction_task(rng: random.Random) -> Task:
    """One to three facts from a text of one to three sentences about a person."""
    sayings = rng.sample(SAYINGS, 6)
    first = rng.choice(sayings)
    count = rng.choices((1, 2, 3), (6, 3, 1))[0]
    wanted = rng.sample(first[1], min(count, len(first[1])))
    useful = [it for it in SAYINGS if {*wanted} <= {*it[1]}]
    source = rng.choice(words.TEXT_FIELDS)
    names: list[str] = []
    for it in wanted:
        left = [name for name in WANTED[it] if name not in (*names, source)]
        names.append(left[0] if rng.random() < 0.5 else rng.choice(left))
    nice = " and the ".join(it.replace("_", " ") for it in names)
    forms = (
        "",
        f"Extract the {nice} from the {source}.",
        f"Find the {nice} in the {source}.",
        f"Read the {source} and give the {nice}.",
        f"Which {nice} does the {source} name?",
        f"Pull out the {nice}.",
    )
    described = rng.random() < 0.15
    fields = tuple(
        Field(
            name,
            f"the {it} in the {source}" if described else "",
            number=it in ("amount", "age") and rng.random() < 0.4,
        )
        for name, it in zip(names, wanted, strict=True)
    )

    def draw(rng: random.Random) -> Case:
        person = _person(rng)
        said = [rng.choice(useful)[0].format(**person)]
        for form, about in rng.sample(SAYINGS, rng.choices((0, 1, 2), (4, 4, 2))[0]):
            if not {*wanted} & {*about} - {"name"}:
                said.append(form.format(**person))
        rng.shuffle(said)
        outputs = {name: person[it] for name, it in zip(names, wanted, strict=True)}
        facts = " and ".join(f"the {name.replace('_', ' ')} is {value}" for name, value in outputs.items())
        guesses = {name: _others(rng, it, person) for name, it in zip(names, wanted, strict=True)}
        reasoning = f"The {source} says that {facts}."
        return Case({source: " ".join(said)}, outputs, reasoning, guesses)

    return Task("extraction", _instruction(rng, forms), (Field(source),), fields, draw)


QUESTIONS = {
    "city": ("Where does {name} live?", "In which city does {name} live?", "What is the city of {name}?"),
    "job": ("What does {name} do?", "What is the job of {name}?", "What does {name} work as?"),
    "age": ("How old is {name}?", "What is the age of {name}?"),
    "country": ("Where does {name} come from?", "Which country does {name} come from?"),
    "product": ("What did {name} buy?", "Which thing did {name} buy?"),
    "month": ("When was {name} born?", "In which month was {name} born?"),
}
_ANSWERED = {
    "city": "{name} lives in {city}.",
    "job": "{name} works as a {job}.",
    "age": "{name} is {age} years old.",
    "country": "{name} comes from {country}.",
    "product": "{name} bought a {product}.",
    "month": "{name} was born in {month}.",
}


def question_task(rng: random.Random) -> Task:
    """A text about several people, a question on one of them."""
    source = rng.choice(("context", "passage", "text", "document", "facts", "notes", "story"))
    asked = rng.choice(("question", "query", "ask"))
    target = rng.choice(("answer", "answer", "response", "result", "reply"))
    forms = (
        "",
        "",
        "Answer the question from the text.",
        f"Answer the {asked} with a word from the {source}.",
        f"Use the {source} to answer the {asked}.",
        f"Give a short {target} to the {asked}.",
    )

    def draw(rng: random.Random) -> Case:
        people = [_person(rng) for _ in range(rng.randint(1, 3))]
        for person, name in zip(people, rng.sample(words.NAMES, len(people)), strict=True):
            person["name"] = name
        wanted = rng.choice([*QUESTIONS])
        said = [_ANSWERED[wanted].format(**it) for it in people]
        said += [_ANSWERED[rng.choice([*QUESTIONS])].format(**people[0])] if rng.random() < 0.2 else []
        rng.shuffle(said)
        person = rng.choice(people)
        question = rng.choice(QUESTIONS[wanted]).format(**person)
        inputs = {source: " ".join(said), asked: question}
        reasoning = f"The {source} says: {_ANSWERED[wanted].format(**person)}"
        others = tuple(it[wanted] for it in people) + _others(rng, wanted, person)
        return Case(inputs, {target: person[wanted]}, reasoning, {target: others})

    return Task("question", _instruction(rng, forms), (Field(source), Field(asked)), (Field(target),), draw)


# --- sums

SUMS = (
    ("+", "{name} has {a} {goods} and gets {b} more. How many {goods} does {name} have now?"),
    ("+", "There are {a} {goods} in one box and {b} in another. How many are there together?"),
    ("+", "{name} buys {a} {goods} on {day} and {b} the next day. How many in all?"),
    ("+", "What is {a} plus {b}?"),
    ("+", "Add {a} and {b}."),
    ("+", "How much is {a} and {b}?"),
    ("-", "{name} has {a} {goods} and gives {b} away. How many are left?"),
    ("-", "Of {a} {goods} {b} are sold. How many remain?"),
    ("-", "What is {a} minus {b}?"),
    ("-", "Take {b} from {a}."),
    ("-", "{name} had {a} {goods} but lost {b}. How many {goods} are there now?"),
    ("*", "{name} has {a} boxes with {b} {goods} each. How many {goods} are there?"),
    ("*", "What is {a} times {b}?"),
    ("*", "{a} children have {b} {goods} each. How many {goods} in all?"),
    ("*", "Each of {a} {goods} costs {b} euros. How much do they cost?"),
)


@dataclass(frozen=True)
class Sum:
    """A sum in words, its expression and its result."""

    question: str
    expression: str
    result: int


def any_sum(rng: random.Random, most: int) -> Sum:
    """Numbers to `most`, in words or digits; products stay small."""
    sign, form = rng.choice(SUMS)
    a, b = rng.randint(1, most), rng.randint(1, most)
    if sign == "*":
        a, b = rng.randint(2, max(5, most // 4)), rng.randint(2, max(5, most // 4))
    if sign == "-" and b > a:
        a, b = b, a
    shown: Callable[[int], str] = str if rng.random() < 0.5 or max(a, b) > 99 else words.in_words
    goods = rng.choice(words.GOODS)
    question = form.format(
        a=shown(a), b=shown(b), goods=goods, name=rng.choice(words.NAMES), day=rng.choice(words.DAYS)
    )
    question = question[0].upper() + question[1:]
    return Sum(question, f"{a} {sign} {b}", {"+": a + b, "-": a - b, "*": a * b}[sign])


def sum_task(rng: random.Random) -> Task:
    """Sums of numbers to twelve, in words."""
    source = rng.choice(("question", "question", "problem", "text", "puzzle", "task", "query"))
    target = rng.choice(("answer", "answer", "result", "number", "total", "solution"))
    forms = (
        "",
        "",
        "Solve the problem.",
        "Answer with a number.",
        f"Compute the {target}.",
        f"Give the {target} as a number.",
        f"Work out the {target} of the {source}.",
    )

    def draw(rng: random.Random) -> Case:
        it = any_sum(rng, 12)
        near = tuple(str(max(0, it.result + by)) for by in (-2, -1, 1, 2))
        reasoning = rng.choice(
            (f"{it.expression} = {it.result}", f"It is {it.expression}, which is {it.result}.")
        )
        return Case({source: it.question}, {target: str(it.result)}, reasoning, {target: near})

    field = Field(target, number=rng.random() < 0.35)
    return Task("sum", _instruction(rng, forms), (Field(source),), (field,), draw)
