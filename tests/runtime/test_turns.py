"""Which turns of a rollout are one sequence, and that being one changes nothing of what is learned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer

from runtime.gateway.engines.engine_client import EngineFacts
from runtime.gateway.samples.samples import SampleStore
from runtime.gateway.steps import selection as selections
from runtime.gateway.steps.batch_building import build
from runtime.gateway.steps.selection import Selection, select
from runtime.gateway.steps.step_records import StepFolder
from runtime.shared.batch import Batch, read_batch, write_batch
from runtime.shared.schema import Group, Member
from runtime.shared.step_settings import UpdateSettings
from runtime.trainer.update import select as choose
from runtime.trainer.update import update
from tests.runtime.conftest import TINY_MODEL
from tests.runtime.recorded import answer, asked, choice, record
from tests.runtime.trainer_fixtures import (
    ALONE,
    SETTINGS,
    VOCABULARY,
    assert_same_gradient,
    measure,
    settings_of,
    trained_policy,
)

META = {"schema": 1, "kind": "train", "step": 1}


def turn(
    store: SampleStore,
    rollout: str,
    prompt: Sequence[int],
    completion: Sequence[int],
    version: int = 0,
    finish: str = "stop",
    **fields: Any,
) -> list[int]:
    """Record one answered request; its prompt and completion as one list."""
    given = choice(list(completion), [-0.25 * (1 + place) for place in range(len(completion))])
    request = asked(rollout=rollout, **fields)
    record(store, request, answer(list(prompt), given | {"finish_reason": finish}), version)
    return [*prompt, *completion]


def pick(store: SampleStore, *rollouts: str, lag: int = 0) -> Selection:
    """Select the rollouts with different rewards; `lag` versions have been committed since version 0."""
    members = [Member(rollout=name, reward=float(index)) for index, name in enumerate(rollouts)]
    groups = [Group(id="g", members=members)]
    return select(
        groups, store, taken=lambda _: False, staleness_of=lambda version: lag - version, max_staleness=2
    )


def batch_of(store: SampleStore, *rollouts: str) -> Batch:
    return build(pick(store, *rollouts), store, META)


def rows(batch: Batch) -> list[tuple[list[int], list[int], list[float]]]:
    """Each sequence as (tokens, which were sampled, their logprobs)."""
    spans = [batch.span(row) for row in range(batch.sequences)]
    return [
        (batch.tokens[span].tolist(), batch.sampled[span].tolist(), batch.logprobs[span].tolist())
        for span in spans
    ]


# ------------------------------------------------------------------ C2

IDS = st.lists(st.integers(0, 50), min_size=1, max_size=8)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=IDS, first=IDS, observed=st.lists(st.integers(0, 50), max_size=6), second=IDS, data=st.data())
def test_c02_a_turn_joins_only_when_its_prompt_is_the_sequence_so_far_id_for_id(
    tmp_path_factory: pytest.TempPathFactory,
    prompt: list[int],
    first: list[int],
    observed: list[int],
    second: list[int],
    data: st.DataObject,
) -> None:
    store = SampleStore(tmp_path_factory.mktemp("c02"))
    so_far = turn(store, "exact", prompt, first)
    whole = turn(store, "exact", so_far + observed, second)
    joined = pick(store, "exact")
    assert (joined.counts.turns_joined, joined.counts.sealed, joined.counts.trained) == (1, 0, 2)
    (row,) = rows(build(joined, store, META))
    assert row[0] == whole
    assert row[1] == [0] * len(prompt) + [1] * len(first) + [0] * len(observed) + [1] * len(second)

    place = data.draw(st.integers(0, len(so_far) - 1), label="rewritten at")
    rewritten = [*so_far]
    rewritten[place] = 51
    turn(store, "rewritten", prompt, first)
    turn(store, "rewritten", rewritten + observed, second)
    apart = pick(store, "rewritten")
    assert (apart.counts.turns_joined, apart.counts.sealed, apart.counts.trained) == (0, 1, 2)
    assert [(ids, flags) for ids, flags, _ in rows(build(apart, store, META))] == [
        (prompt + first, [0] * len(prompt) + [1] * len(first)),
        (rewritten + observed + second, [0] * (len(so_far) + len(observed)) + [1] * len(second)),
    ]


def test_c02_no_token_is_learned_twice_and_none_that_was_not_sampled(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    so_far = turn(store, "r", [1, 2], [3, 4])
    longer = turn(store, "r", [*so_far, 5], [6])
    turn(store, "r", [*so_far, 7], [8])  # another way on from the first turn
    turn(store, "r", [*longer, 9], [10, 11])
    batch = batch_of(store, "r")
    assert [ids for ids, _, _ in rows(batch)] == [[1, 2, 3, 4, 5, 6, 9, 10, 11], [1, 2, 3, 4, 7, 8]]
    assert [flags for _, flags, _ in rows(batch)] == [[0, 0, 1, 1, 0, 1, 0, 1, 1], [0, 0, 0, 0, 0, 1]]
    assert batch.logprobs[batch.sampled == 0].tolist() == [0.0] * 9
    assert batch.meta["counts"]["sampled_tokens"] == int(batch.sampled.sum()) == 6
    assert (batch.meta["counts"]["turns_joined"], batch.meta["counts"]["sealed"]) == (2, 1)


@pytest.mark.parametrize(
    "second",
    [{"temperature": 0.5}, {"finish": "length"}, {"x_slipway_predictor": "other"}],
    ids=["another temperature", "cut off", "another predictor"],
)
def test_turns_that_the_trainer_treats_differently_are_not_joined(
    tmp_path: Path, second: dict[str, Any]
) -> None:
    store = SampleStore(tmp_path)
    so_far = turn(store, "after", [1, 2], [3, 4])
    turn(store, "after", [*so_far, 5], [6], **second)
    turn(store, "before", [1, 2], [3, 4], **second)
    turn(store, "before", [*so_far, 5], [6])
    for rollout in ("after", "before"):
        selection = pick(store, rollout)
        assert (selection.counts.trained, selection.counts.turns_joined) == (2, 0)


def test_a_turn_that_cannot_be_trained_carries_no_loss_in_the_sequence_that_went_on(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    so_far = turn(store, "r", [1], [2, 3])
    so_far = turn(store, "r", [*so_far, 4], [5, 6], temperature=0)
    turn(store, "r", [*so_far, 7], [8])
    selection = pick(store, "r")
    assert selection.counts.dropped == {"greedy": 1}
    (row,) = rows(build(selection, store, META))
    assert row[:2] == ([1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 1, 0, 0, 0, 0, 1])


def test_answers_to_one_question_are_not_turns(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    choices = [choice([10 + index], [-1.0], index=index) for index in range(3)]
    record(store, asked(rollout="r", n=3), answer([1, 2], *choices))
    turn(store, "r", [1, 2], [13])
    counts = pick(store, "r").counts
    assert (counts.trained, counts.turns_joined, counts.sealed) == (4, 0, 0)


# ------------------------------------------------------------------ C38, C39


def test_c38_a_sequence_sampled_over_a_swap_records_the_version_of_each_segment(tmp_path: Path) -> None:
    store = SampleStore(tmp_path / "samples")
    so_far = turn(store, "r", [1, 2], [3, 4], version=3)
    so_far = turn(store, "r", [*so_far, 5], [6], version=3)
    turn(store, "r", [*so_far, 7], [8, 9], version=5)
    write_batch(tmp_path / "000001", batch_of(store, "r"))
    batch = read_batch(tmp_path / "000001")
    (said,) = batch.meta["samples"]
    segments = [(one["version"], one["start"], one["end"]) for one in said["turns"]]
    assert segments == [(3, 2, 4), (3, 5, 6), (5, 7, 9)]
    flags = np.zeros(9, np.uint8)
    for _, start, end in segments:
        flags[start:end] = 1
    assert batch.sampled.tolist() == flags.tolist()
    assert batch.version.tolist() == [3]


def test_c38_a_sequence_is_as_stale_as_its_oldest_turn(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    so_far = turn(store, "straddling", [1, 2], [3, 4], version=0)
    turn(store, "straddling", [*so_far, 5], [6], version=2)
    turn(store, "fresh", [1, 2], [3], version=2)
    assert pick(store, "straddling", "fresh", lag=2).counts.trained == 3
    late = pick(store, "straddling", "fresh", lag=3).counts
    assert (late.trained, late.dropped) == (1, {"stale": 2})


# ------------------------------------------------------------------ C3: templates as families write them

PLAIN = """{% for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Qwen3, DeepSeek-R1: earlier answers lose their thoughts, the last one keeps them.
THINKING = """{% for m in messages %}{% set text = m.content %}
{%- if m.role == 'assistant' and not loop.last %}
{%- set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Qwen2.5, Hermes: a call is written anew from its parts.
CALLING = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Llama 3.1 and later: the system prompt says which day it is.
DATED = """{{ '<|im_start|>system\nToday Date: ' + strftime_now('%d %b %Y') + '<|im_end|>\n' }}""" + PLAIN

QUESTION = {"role": "user", "content": "the red cat"}
MORE = {"role": "user", "content": "and the black dog"}
CALL = {"name": "look", "arguments": {"at": "the cat"}}


@dataclass
class Conversation:
    """Two turns through a chat template: `text` is sampled, the client sends `reply` back."""

    template: str
    text: str
    reply: dict[str, Any] = field(default_factory=dict)
    days_later: int = 0

    def record(self, store: SampleStore, rollout: str) -> None:
        first = self.render([QUESTION], 0)
        completion = [*self.ids(self.text), EOS]
        turn(store, rollout, first, completion)
        reply = {"role": "assistant", "content": self.text} | self.reply
        turn(store, rollout, self.render([QUESTION, reply, MORE], self.days_later), completion)

    def render(self, messages: list[dict[str, Any]], day: int) -> list[int]:
        now = date(2026, 11, 21) + timedelta(days=day)
        shown = TOKENIZER.apply_chat_template(
            messages,
            chat_template=self.template,
            add_generation_prompt=True,
            tokenize=False,
            strftime_now=now.strftime,
        )
        return self.ids(str(shown))

    @staticmethod
    def ids(text: str) -> list[int]:
        return TOKENIZER(text, add_special_tokens=False).input_ids


TOKENIZER = AutoTokenizer.from_pretrained(TINY_MODEL)
EOS = int(TOKENIZER.convert_tokens_to_ids("<|im_end|>"))
THOUGHTS = "<think>\na cat\n</think>\n\nle chat rouge"
WRITTEN = '<tool_call>\n{"name": "look", "arguments": {"at": "the cat"}}\n</tool_call>'
ANSWERED = {"content": None, "tool_calls": [{"type": "function", "function": CALL}]}

REWRITTEN = {
    "thoughts stripped": Conversation(THINKING, THOUGHTS),
    "thoughts not sent back": Conversation(PLAIN, THOUGHTS, {"content": "le chat rouge"}),
    "a call written anew": Conversation(CALLING, WRITTEN.replace('": ', '":'), ANSWERED),
    "another day": Conversation(DATED, "le chat rouge", days_later=1),
    "a stop string left out of the text": Conversation(PLAIN, "le chat rouge!", {"content": "le chat rouge"}),
    "text that tokenises differently": Conversation(PLAIN, "le chat rouge ", {"content": "le chat rouge"}),
}
KEPT = {
    "plain": Conversation(PLAIN, "le chat rouge"),
    "no thoughts": Conversation(THINKING, "le chat rouge"),
    "a call as the template writes it": Conversation(CALLING, WRITTEN, ANSWERED),
    "the same day": Conversation(DATED, "le chat rouge"),
}


@pytest.mark.parametrize("how", REWRITTEN)
def test_c03_an_answer_the_template_rewrote_seals_the_sequence_and_is_counted(
    tmp_path: Path, how: str
) -> None:
    store = SampleStore(tmp_path)
    REWRITTEN[how].record(store, "r")
    selection = pick(store, "r")
    assert (selection.counts.turns_joined, selection.counts.sealed) == (0, 1)
    assert selection.counts.trained == 2 and selection.counts.retokenised == 0
    exchanges = [store.load(ref) for ref in store.of_rollout("r")]
    recorded = [exchange.prompts[0] + sample.completion_ids for exchange, sample in exchanges]
    assert [ids for ids, _, _ in rows(build(selection, store, META))] == recorded


@pytest.mark.parametrize("how", KEPT)
def test_an_answer_the_template_left_alone_is_joined(tmp_path: Path, how: str) -> None:
    store = SampleStore(tmp_path)
    KEPT[how].record(store, "r")
    counts = pick(store, "r").counts
    assert (counts.turns_joined, counts.sealed, counts.trained) == (1, 0, 2)


def test_c03_a_doubled_first_token_is_noticed_and_counted(tmp_path: Path) -> None:
    bos, ids = "<|endoftext|>", TOKENIZER.convert_tokens_to_ids("<|endoftext|>")
    adding = AutoTokenizer.from_pretrained(TINY_MODEL)
    adding.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, ids)]
    )
    shown = str(
        adding.apply_chat_template([QUESTION], chat_template="{{ '" + bos + "' }}" + PLAIN, tokenize=False)
    )
    doubled = adding.backend_tokenizer.encode(shown, add_special_tokens=True).ids
    single = adding.backend_tokenizer.encode(shown, add_special_tokens=False).ids
    assert doubled[:2] == [ids, ids] and doubled[1:] == single
    store = SampleStore(tmp_path)
    for rollout, prompt in (("doubled", doubled), ("single", single)):
        content = answer(prompt, choice([7, 8], [-0.5, -0.5]))
        record(store, asked(rollout=rollout), content, engine=EngineFacts(first_token=ids))
    selection = pick(store, "doubled", "single")
    assert selection.counts.dropped == {"doubled BOS": 1} and selection.counts.trained == 1


# ------------------------------------------------------------------ the trainer sees no difference


def conversations(store: SampleStore) -> list[str]:
    """Rollouts of one to four turns in the small model's vocabulary; some of them share their beginning."""
    random = np.random.default_rng(5)

    def ids(length: int) -> list[int]:
        return random.integers(3, VOCABULARY, length).tolist()

    names, starts = [], [ids(20), ids(12)]
    for number in range(6):
        rollout = f"r{number}"
        so_far = starts[number % 2]
        for _ in range(1 + number % 4):
            so_far = turn(store, rollout, so_far, ids(int(random.integers(2, 9))))
            so_far = so_far + ids(int(random.integers(1, 6)))
        names.append(rollout)
    return names


@pytest.fixture
def joined_and_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Batch, Batch]:
    """The same samples, their turns joined, and every turn by itself."""
    store = SampleStore(tmp_path)
    names = conversations(store)
    joined = batch_of(store, *names)
    monkeypatch.setattr(selections, "join", lambda refs, load: ([[ref] for ref in refs], Counter()))
    apart = batch_of(store, *names)
    assert (joined.sequences, apart.sequences) == (6, 13)
    return joined, apart


@pytest.mark.parametrize(
    "chosen",
    [
        settings_of(kl_beta=0.05, pack_tokens=64),
        settings_of("gspo"),
        settings_of("dr_grpo", constant_tokens=40),
        settings_of("dapo", overlong="soft", overlong_tokens=10, overlong_buffer=6),
        settings_of(normaliser="sequence"),
    ],
    ids=["grpo", "gspo", "dr_grpo", "dapo", "by sequence"],
)
def test_c02_turns_joined_are_learned_as_if_they_were_apart(
    joined_and_apart: tuple[Batch, Batch], chosen: UpdateSettings
) -> None:
    joined, apart = [measure(trained_policy(), batch, chosen) for batch in joined_and_apart]
    assert_same_gradient(joined.gradient, apart.gradient)
    assert joined.metrics == pytest.approx(apart.metrics, rel=1e-4, abs=1e-6)


def test_the_trainer_counts_samples_whether_their_turns_are_joined_or_not(
    joined_and_apart: tuple[Batch, Batch],
) -> None:
    import torch

    def counted(batch: Batch) -> dict[str, Any]:
        policy = trained_policy()
        done = update(policy, torch.optim.SGD(policy.master_weights.values(), lr=0.0), batch, SETTINGS, ALONE)
        return done.counts

    joined, apart = [counted(batch) for batch in joined_and_apart]
    assert (joined.pop("turns_joined"), apart.pop("turns_joined")) == (7, 0)
    assert joined == apart
    assert joined["trained"] == joined["samples"] == 13


def test_dropping_a_sequence_drops_each_of_its_turns(joined_and_apart: tuple[Batch, Batch]) -> None:
    flat = [replace(batch, reward=np.ones_like(batch.reward)) for batch in joined_and_apart]
    assert [choose(batch, SETTINGS).learnable.dropped["no variance in its group"] for batch in flat] == [
        13,
        13,
    ]


def test_g18_a_step_whose_entry_is_lost_has_every_turn_that_its_batch_has(tmp_path: Path) -> None:
    """A joined turn that no step has any more would be trained a second time."""
    store = SampleStore(tmp_path / "samples")
    first = turn(store, "r", [1, 2, 3], [4, 5])
    turn(store, "r", [*first, 6], [7, 8])
    turn(store, "other", [1, 2], [9])
    picked = pick(store, "r", "other")
    folder = StepFolder(tmp_path / "steps")
    write_batch(folder.of_batch(1), build(picked, store, META))
    (step,) = folder.read_all({})
    assert step.samples == picked.ids and len(step.samples) == 3
