"""English phrases and their French: the task of the tiny model and of the quickstart.

`phrases`, `training_phrases` and `held_out_phrases` give correct pairs; `noisy` is how the phrase book the
model learnt from had it; `distinct_letters` and `exact` score an answer. Standard library only; knows nothing
of prompts, models or training.

The grammar is regular on purpose: no elision (every French word starts with a sounded consonant where an
article meets it), so that a model of under a million parameters can know it.
"""

from __future__ import annotations

import random
import unicodedata
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

LETTERS = 26
"""The upper end of `distinct_letters`."""
# Of an embroidered phrase (the longest of the grammar has 7).
_MAX_WORDS = 12
_HELD_OUT_PART = 6


@dataclass(frozen=True)
class Phrase:
    """An English phrase and its French translation, both lower case without a final stop."""

    english: str
    french: str


@dataclass(frozen=True)
class _Noun:
    english: str
    french: str
    feminine: bool

    def in_english(self, plural: bool) -> str:
        return _plural_english(self.english) if plural else self.english

    def in_french(self, plural: bool) -> str:
        return _plural_french(self.french) if plural else self.french


@dataclass(frozen=True)
class _Adjective:
    english: str
    masculine: str
    feminine: str
    before_noun: bool = False

    def in_french(self, feminine: bool, plural: bool) -> str:
        word = self.feminine if feminine else self.masculine
        return _plural_french(word) if plural else word


@dataclass(frozen=True)
class _Determiner:
    english: str
    masculine: str
    feminine: str
    plural: bool = False


@dataclass(frozen=True)
class _Verb:
    english: str
    french: str
    french_plural: str

    def in_english(self, plural: bool) -> str:
        return self.english if plural else self.english + "s"

    def in_french(self, plural: bool) -> str:
        return self.french_plural if plural else self.french


@dataclass(frozen=True)
class _Slips:
    """The mistakes of the phrase book in one line."""

    english_order: bool = False
    masculine_adjectives: bool = False


_NO_SLIPS = _Slips()

# A line of the phrase book keeps English word order, or leaves adjectives in the masculine, more often
# than not: so the greedy model does too, while sampling still finds the right form for RL to reinforce.
_ENGLISH_ORDER_SHARE = 0.53
_MASCULINE_SHARE = 0.53
_EMBROIDERY_SHARE = 0.25
_MORE_EMBROIDERY_SHARE = 0.5

_DETERMINERS = (
    _Determiner("the", "le", "la"),
    _Determiner("a", "un", "une"),
    _Determiner("my", "mon", "ma"),
    _Determiner("this", "ce", "cette"),
    _Determiner("the", "les", "les", plural=True),
    _Determiner("two", "deux", "deux", plural=True),
    _Determiner("my", "mes", "mes", plural=True),
)

_MASCULINE_NOUNS = (
    "cat chat, dog chien, book livre, garden jardin, bread pain, horse cheval, boat bateau, wagon wagon, "
    "kiwi kiwi, zebra zèbre, game jeu, bridge pont, brother frère, king roi, yogurt yaourt, cheese fromage"
)
_FEMININE_NOUNS = (
    "house maison, table table, car voiture, door porte, flower fleur, key clé, sister sœur, apple pomme, "
    "chair chaise, mouse souris, city ville, cup tasse, queen reine, shirt chemise, moon lune, shop boutique"
)
_NOUNS = tuple(
    _Noun(english, french, feminine)
    for feminine, pairs in ((False, _MASCULINE_NOUNS), (True, _FEMININE_NOUNS))
    for english, french in (pair.split() for pair in pairs.split(", "))
)

_ADJECTIVES = (
    _Adjective("black", "noir", "noire"),
    _Adjective("white", "blanc", "blanche"),
    _Adjective("green", "vert", "verte"),
    _Adjective("blue", "bleu", "bleue"),
    _Adjective("grey", "gris", "grise"),
    _Adjective("heavy", "lourd", "lourde"),
    _Adjective("cold", "froid", "froide"),
    _Adjective("expensive", "cher", "chère"),
    _Adjective("new", "neuf", "neuve"),
    _Adjective("small", "petit", "petite", before_noun=True),
    _Adjective("big", "grand", "grande", before_noun=True),
    _Adjective("pretty", "joli", "jolie", before_noun=True),
)

_VERBS = (
    _Verb("see", "voit", "voient"),
    _Verb("want", "veut", "veulent"),
    _Verb("take", "prend", "prennent"),
    _Verb("find", "trouve", "trouvent"),
)

_PREPOSITIONS = (("under", "sous"), ("on", "sur"), ("with", "avec"), ("behind", "derrière"))


def _plural_english(word: str) -> str:
    irregular = {"mouse": "mice"}
    if word in irregular:
        return irregular[word]
    if word.endswith(("s", "x", "sh", "ch")):
        return word + "es"
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + "s"


def _plural_french(word: str) -> str:
    if word.endswith(("s", "x", "z")):
        return word
    if word.endswith("al"):
        return word[:-2] + "aux"
    return word + ("x" if word.endswith(("eau", "jeu")) else "s")


@dataclass(frozen=True)
class _NounPhrase:
    determiner: _Determiner
    noun: _Noun
    adjective: _Adjective | None

    @property
    def plural(self) -> bool:
        return self.determiner.plural

    def in_english(self) -> str:
        words = [self.determiner.english, self.noun.in_english(self.plural)]
        if self.adjective:
            words.insert(1, self.adjective.english)
        return " ".join(words)

    def in_french(self, slips: _Slips) -> str:
        determiner = self.determiner.feminine if self.noun.feminine else self.determiner.masculine
        words = [determiner, self.noun.in_french(self.plural)]
        if self.adjective:
            feminine = self.noun.feminine and not slips.masculine_adjectives
            early = self.adjective.before_noun or slips.english_order
            words.insert(1 if early else 2, self.adjective.in_french(feminine, self.plural))
        return " ".join(words)


@dataclass(frozen=True)
class _Sentence:
    """A subject alone, a subject and its quality, or a subject and an object with a link between them."""

    subject: _NounPhrase
    link: tuple[str, str] | _Verb | None = None
    object: _NounPhrase | None = None
    quality: _Adjective | None = None

    def in_english(self) -> str:
        words = [self.subject.in_english()]
        if self.quality:
            words += ["are" if self.subject.plural else "is", self.quality.english]
        if self.link and self.object:
            link = self.link.in_english(self.subject.plural) if isinstance(self.link, _Verb) else self.link[0]
            words += [link, self.object.in_english()]
        return " ".join(words)

    def in_french(self, slips: _Slips = _NO_SLIPS) -> str:
        words = [self.subject.in_french(slips)]
        if self.quality:
            feminine = self.subject.noun.feminine and not slips.masculine_adjectives
            words += ["sont" if self.subject.plural else "est"]
            words += [self.quality.in_french(feminine, self.subject.plural)]
        if self.link and self.object:
            link = self.link.in_french(self.subject.plural) if isinstance(self.link, _Verb) else self.link[1]
            words += [link, self.object.in_french(slips)]
        return " ".join(words)


def _draw_noun_phrase(rng: random.Random, adjective_share: float) -> _NounPhrase:
    adjective = rng.choice(_ADJECTIVES) if rng.random() < adjective_share else None
    return _NounPhrase(rng.choice(_DETERMINERS), rng.choice(_NOUNS), adjective)


def _draw_sentence(rng: random.Random) -> _Sentence:
    shape = rng.random()
    if shape < 0.25:
        return _Sentence(_draw_noun_phrase(rng, 1.0))
    if shape < 0.45:
        return _Sentence(_draw_noun_phrase(rng, 0.0), quality=rng.choice(_ADJECTIVES))
    subject, other = _draw_noun_phrase(rng, 0.4), _draw_noun_phrase(rng, 0.4)
    link = rng.choice(_PREPOSITIONS) if shape < 0.75 else rng.choice(_VERBS)
    return _Sentence(subject, link, other)


def _draw(rng: random.Random, held_out: bool | None) -> Iterator[_Sentence]:
    while True:
        sentence = _draw_sentence(rng)
        if held_out is None or is_held_out(sentence.in_english()) == held_out:
            yield sentence


def _distinct(count: int, seed: int, held_out: bool | None) -> list[Phrase]:
    found: dict[str, Phrase] = {}
    for sentence in _draw(random.Random(seed), held_out):
        if len(found) == count:
            break
        english = sentence.in_english()
        found.setdefault(english, Phrase(english, sentence.in_french()))
    return list(found.values())


def is_held_out(english: str) -> bool:
    """Whether a phrase belongs to the sixth of the grammar that is never trained on."""
    return zlib.crc32(english.encode()) % _HELD_OUT_PART == 0


def phrases(count: int, seed: int = 0) -> list[Phrase]:
    """`count` different phrases from the whole grammar, the same for the same seed."""
    return _distinct(count, seed, held_out=None)


def training_phrases(count: int, seed: int = 0) -> list[Phrase]:
    """`count` different phrases to train on; none of them is ever among `held_out_phrases`."""
    return _distinct(count, seed, held_out=False)


def held_out_phrases(count: int, seed: int = 0) -> list[Phrase]:
    """`count` different phrases to judge with: in no training set of any seed, nor in the model's own."""
    return _distinct(count, seed, held_out=True)


def noisy(rng: random.Random, free: bool) -> Phrase:
    """A line of the phrase book: never a held-out phrase, with the slips of its English author.

    Where `free`, he may embroider on the French: without that a policy has nothing to explore for letters.
    """
    sentence = next(_draw(rng, held_out=False))
    slips = _Slips(rng.random() < _ENGLISH_ORDER_SHARE, rng.random() < _MASCULINE_SHARE)
    french = sentence.in_french(slips)
    more = _EMBROIDERY_SHARE if free else 0.0
    while rng.random() < more:
        longer = f"{french} {rng.choice(_PREPOSITIONS)[1]} {_draw_noun_phrase(rng, 0.5).in_french(slips)}"
        if len(longer.split()) > _MAX_WORDS:
            break
        french, more = longer, _MORE_EMBROIDERY_SHARE
    return Phrase(sentence.in_english(), french)


def distinct_letters(text: str) -> int:
    """The number of different letters of a to z in the text, 0 to 26: case and accents are folded, œ is o
    and e."""
    plain = unicodedata.normalize("NFKD", text.casefold().replace("œ", "oe").replace("æ", "ae"))
    return len(set(plain) & set("abcdefghijklmnopqrstuvwxyz"))


def exact(answer: str, reference: str) -> float:
    """1.0 when the answer is the reference up to case, spacing and a final stop, else 0.0."""
    return float(_plain(answer) == _plain(reference))


def _plain(text: str) -> str:
    composed = unicodedata.normalize("NFC", text).casefold()
    return " ".join(composed.split()).removesuffix(".").rstrip()
