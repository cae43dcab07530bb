"""Fine-tuning as the stock `openai` SDK asks for it, on a real engine and trainer, in the shared run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from launcher.client import Session, connect
from runtime.tiny.chat import completion, messages
from runtime.tiny.grammar import training_phrases
from tests.support.launched import Launched
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

ENDED = ("succeeded", "failed", "cancelled")


@pytest.fixture(scope="module")
def run(pupil: Launched) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAUNCH_HOME", str(pupil.home))
        yield connect("shared")


@pytest.fixture(scope="module")
def client(run: Session) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=run.base_url, api_key=run.api_key, timeout=600, max_retries=0) as client:
        yield client


def question(english: str) -> Any:
    return messages("english", "french", english)


def uploaded(client: openai.OpenAI, count: int) -> str:
    said = [
        [
            *question(one.english),
            {"role": "assistant", "content": completion("french", "bonjour " + one.french)},
        ]
        for one in training_phrases(count)
    ]
    text = "\n".join(json.dumps({"messages": conversation}) for conversation in said)
    return client.files.create(file=("phrases.jsonl", text.encode()), purpose="fine-tune").id


def test_a14_the_openai_sdk_tunes_the_policy_and_the_model_that_comes_out_answers(
    client: openai.OpenAI, run: Session
) -> None:
    before = run.status()
    job = client.fine_tuning.jobs.create(
        model="policy", training_file=uploaded(client, 16), seed=7,
        hyperparameters={"n_epochs": 2, "batch_size": 8, "learning_rate_multiplier": 1.5},
    )  # fmt: skip
    wait_until(lambda: client.fine_tuning.jobs.retrieve(job.id).status in ENDED, 180, "the job ends")
    ended = client.fine_tuning.jobs.retrieve(job.id)
    events = [event.message for event in client.fine_tuning.jobs.list_events(job.id)]
    assert ended.status == "succeeded", events
    assert ended.trained_tokens and ended.fine_tuned_model == f"policy@v{before.version + 4}"
    assert run.client_state == before.client_state, "a program's place is its own"
    kept = client.fine_tuning.jobs.checkpoints.list(job.id).data
    assert [(one.step_number, one.fine_tuned_model_checkpoint) for one in kept] == [
        (4, f"policy@v{before.version + 4}"), (2, f"policy@v{before.version + 2}"),
    ]  # fmt: skip
    losses = client.files.content(ended.result_files[0]).text.splitlines()
    assert losses[0] == "step,train_loss" and float(losses[-1].split(",")[1]) < float(losses[1].split(",")[1])
    asked = question(training_phrases(1)[0].english)
    answer = client.chat.completions.create(model=ended.fine_tuned_model, messages=asked, max_tokens=16)
    assert answer.model == ended.fine_tuned_model and answer.choices[0].message.content
    steps = run.metrics(after=before.step)
    assert [line["kind"] for line in steps] == ["supervised"] * 4
    assert {line["settings"]["learning_rate"] for line in steps} == {1.5 * 2e-3}


def test_a14_a_job_that_is_cancelled_takes_no_further_step(client: openai.OpenAI, run: Session) -> None:
    job = client.fine_tuning.jobs.create(
        model="policy", training_file=uploaded(client, 64),
        hyperparameters={"n_epochs": 50, "batch_size": 1},
    )  # fmt: skip
    wait_until(lambda: client.fine_tuning.jobs.retrieve(job.id).status == "running", 60, "the job runs")
    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    settled = run.settle().version
    assert client.fine_tuning.jobs.retrieve(job.id).status == "cancelled"
    assert run.settle().version == settled
