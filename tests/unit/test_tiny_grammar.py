"""The quickstart's task: phrases that never leak from training to judging, and rewards that count right."""

from __future__ import annotations

import random
from itertools import product

import pytest

from runtime.tiny import grammar


def test_no_training_phrase_of_any_seed_is_ever_held_out() -> None:
    training = {phrase.english for seed in range(5) for phrase in grammar.training_phrases(500, seed)}
    held_out = {phrase.english for seed in range(5) for phrase in grammar.held_out_phrases(500, seed)}
    assert not training & held_out


def test_the_phrase_book_the_model_learnt_from_holds_no_held_out_phrase() -> None:
    rng = random.Random(0)
    for free, _ in product((True, False), range(2000)):
        assert not grammar.is_held_out(grammar.noisy(rng, free).english)


def test_phrases_are_different_and_the_same_for_the_same_seed() -> None:
    first = grammar.training_phrases(300, seed=7)
    assert first == grammar.training_phrases(300, seed=7)
    assert first != grammar.training_phrases(300, seed=8)
    assert len({phrase.english for phrase in first}) == 300


@pytest.mark.process
def test_the_reference_french_agrees_and_orders_its_adjectives() -> None:
    known = {
        "the green house": "la maison verte",
        "two white horses": "deux chevaux blancs",
        "my pretty sister": "ma jolie sœur",
        "my keys are expensive": "mes clés sont chères",
    }
    found = {phrase.english: phrase.french for phrase in grammar.phrases(20_000)}
    assert {english: found[english] for english in known} == known


@pytest.mark.process
def test_the_phrase_book_is_wrong_more_often_than_not_where_it_slips() -> None:
    right = {phrase.english: phrase.french for phrase in grammar.phrases(30_000)}
    rng = random.Random(3)
    lines = [grammar.noisy(rng, free=False) for _ in range(3000)]
    known = [line for line in lines if line.english in right]
    share = sum(right[line.english] == line.french for line in known) / len(known)
    assert 0.4 < share < 0.75


def test_distinct_letters_folds_case_and_accents_and_counts_nothing_else() -> None:
    assert grammar.distinct_letters("") == 0
    assert grammar.distinct_letters("Été, été! 12") == 2
    assert grammar.distinct_letters("sœur") == len(set("soeur"))
    assert grammar.distinct_letters("the quick brown fox jumps over the lazy dog") == grammar.LETTERS


def test_exact_forgives_case_spacing_and_a_final_stop_only() -> None:
    assert grammar.exact(" La  maison verte.\n", "la maison verte") == 1.0
    assert grammar.exact("la verte maison", "la maison verte") == 0.0
    assert grammar.exact("", "la maison verte") == 0.0
