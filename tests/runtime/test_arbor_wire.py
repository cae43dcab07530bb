"""The wire for unmodified Arbor clients: what is sent is trained once, and what goes wrong is an error."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from runtime.gateway.arbor.batch_ids import BatchIds
from runtime.gateway.arbor.jobs import LEAST_LISTED, MOST_UNTRAINED
from runtime.shared.files import write_json
from tests.runtime.arbor_wire import GENERATIONS, Wire, wires
from tests.runtime.failpoints import arm
from tests.support.waiting import wait_until

pytestmark = pytest.mark.process

JOB = re.compile(r"grpo:policy:[a-z]+-[a-z]+-[0-9a-f]{8}:[0-9]{8}")
PREFIXES = ("/v1/fine_tuning/grpo", "/fine_tuning/grpo")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    """One wire for what breaks nothing."""
    with wires(tmp_path_factory.mktemp("shared")) as make:
        yield make()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Callable[..., Wire]]:
    """Wires that a test may break."""
    with wires(tmp_path) as make:
        yield make


# ---------------------------------------------------------------------- A12


def test_a12_groups_sent_again_doubled_out_of_order_or_cut_off_are_one_step_and_trained_once(own) -> None:
    it: Wire = own()
    job = it.begin()["job_id"]
    ids = it.pending(job)
    assert len(ids) == len(set(ids)) >= LEAST_LISTED
    groups = [it.group(f"question {number}") for number in range(3)]
    # An answer that is lost with the gateway: it was taken in, and is sent again.
    arm(it.armed, "arbor.taken:kill9")
    with pytest.raises(httpx.TransportError):
        it.send(job, ids[0], groups[0])
    it.restart()
    sent = [(one, groups[place % 3]) for place, one in enumerate(ids)]
    order = [*sent, *sent[:7]]
    random.Random(5).shuffle(order)
    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(lambda one: it.send(job, *one), order)]
    assert {answer["current_model"] for answer in answers} == {f"{job}@s1"}
    assert it.refused("step", job_id=job, batch=groups[1], batch_id=ids[0])[:2] == (409, "key_reused")
    said = it.settled(job)
    assert (said["metrics"]["rounds_trained"], said["metrics"]["groups_trained"]) == (1, 3), said
    assert said["metrics"]["copies"] == len(ids) - 3
    assert len(it.trained) == len(set(it.trained)) == said["metrics"]["samples_trained"] == 3 * GENERATIONS
    assert said["last_round"]["counts"]["dropped"] == {} and said["metrics"]["retokenised"] == 0
    # Sent once more when all is over: the same answer, and no other step.
    again = it.send(job, ids[0], groups[0])
    assert again["current_model"] == f"{job}@s1"
    assert (
        it.settled(job)["metrics"]["rounds"] == 1 and len(it.gateway.http.get("/slipway/steps").json()) == 1
    )


def test_a12_ids_are_new_after_every_step_and_in_every_life_of_a_gateway(own) -> None:
    it: Wire = own()
    job = it.begin()["job_id"]
    first = it.pending(job)
    assert it.pending(job) == first, "unfulfilled, they are still wanted"
    it.round(job, [it.group("one")])
    second = it.pending(job)
    other = it.pending(it.begin()["job_id"])
    it.gateway.kill()
    it.restart()
    third = it.pending(job)
    lists = [first, second, other, third]
    assert sum(map(len, lists)) == len({*first, *second, *other, *third})
    # A machine that was lost leaves nothing of them behind.
    assert not set(BatchIds().listed([], (), 64)) & {*first, *second, *other, *third}


def test_a12_what_the_clients_queue_still_has_is_no_other_group_and_the_same_answers_anew_are(shared) -> None:
    job = shared.begin()["job_id"]
    old = shared.group("a question asked twice")
    shared.round(job, [old])
    before = shared.settled(job)["metrics"]
    # The optimizer's queue: copies of the last round first, then what it has just rolled out.
    shared.round(job, [old, shared.group("another")])
    after = shared.settled(job)
    assert after["last_round"]["groups"] == 1 and after["last_round"]["counts"]["trained"] == GENERATIONS
    # The very same texts and rewards, sampled anew: a group like any other.
    anew = shared.group("a question asked twice")
    assert anew == old
    shared.round(job, [anew])
    last = shared.settled(job)
    assert last["last_round"]["groups"] == 1 and last["last_round"]["counts"]["trained"] == GENERATIONS
    assert last["metrics"]["groups_trained"] == before["groups_trained"] + 2
    assert len(shared.trained) == len(set(shared.trained))


def test_a12_an_optimizer_with_many_groups_is_asked_for_more_than_it_has(shared) -> None:
    job = shared.begin()["job_id"]
    shared.pending(job)
    groups = [shared.group(f"of many {number}") for number in range(LEAST_LISTED)]
    assert len(shared.pending(job)) >= 2 * len(groups)
    shared.round(job, groups)
    assert shared.settled(job)["last_round"]["groups"] == len(groups)


def test_a12_what_else_a_client_may_do_has_an_answer(shared) -> None:
    first, second = shared.begin(a_key_nobody_knows=1), shared.begin()
    assert JOB.fullmatch(first["job_id"]) and first["job_id"] != second["job_id"]
    for route in ("status", "step", "checkpoint", "terminate", "cancel"):
        body = {"job_id": "nobody", "batch": [], "batch_id": 1, "checkpoint_name": "x"}
        body |= {"batch": shared.group("x")}
        assert shared.refused(route, **body)[0] == 404, route
    job = first["job_id"]
    ids = shared.pending(job)
    # A list of groups under one id; a completion as its text; a reward that is none.
    some, more = shared.group("listed one"), shared.group("listed two", size=3)
    some[0]["completion"] = some[0]["completion"]["content"]
    more[0]["reward"] = None
    shared.send(job, ids[0], [some, more], metrics={"validation_score": 59.0, "format_failures": 0})
    ended = [shared.ask("terminate", job_id=job) for _ in range(2)]
    assert ended[0] == ended[1] and ended[0]["status"] == "succeeded"
    assert ended[0]["metrics"]["groups_trained"] == 2 and ended[0]["metrics"]["validation_score"] == 59.0
    assert ended[0]["last_round"]["counts"]["dropped"] == {"no reward": 1}
    version = ended[0]["last_round"]["version"]
    assert ended[0]["current_model"] == f"{job}@v{version}"
    assert shared.send(job, ids[0], [some, more])["current_model"] == f"{job}@s1"
    assert shared.refused("step", job_id=job, batch=some, batch_id=ids[1])[:2] == (409, "job_ended")
    assert shared.refused("status", job_id=job)[:2] == (409, "job_ended"), "a client would ask for ever"
    # The run goes on; so does the other job, until it is cancelled with what it sent.
    other = second["job_id"]
    shared.send(other, shared.pending(other)[0], shared.group("never trained"))
    cancelled = [shared.ask("cancel", job_id=other) for _ in range(2)]
    assert cancelled[0] == cancelled[1] and "1 batches were not trained" in cancelled[0]["notes"][-1]
    assert shared.gateway.chat().status_code == 200


def test_a12_both_addresses_answer_and_launching_or_killing_ends_nothing(shared) -> None:
    for prefix in PREFIXES:
        body = {"model": "openai/arbor:policy", "trainer_config": {}}
        assert shared.post("initialize", prefix, **body).status_code == 200
        chat = prefix.removesuffix("/fine_tuning/grpo") + "/chat"
        assert shared.post("launch", chat, model="policy", launch_kwargs={}).status_code == 200
        assert shared.gateway.http.post(f"{chat}/kill").status_code == 200
        for route in (f"{prefix}/status", f"{chat}/kill"):
            assert (
                shared.gateway.http.post(route, headers={"Authorization": "Bearer arbor"}).status_code == 401
            )
    assert shared.gateway.chat().status_code == 200
    assert shared.post("initialize", model="gpt-4.1-mini").status_code == 404


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("step", {"batch_id": "0", "batch": [{}]}),
        ("step", {"batch_id": 1, "batch": []}),
        ("step", {"batch_id": 1, "batch": [[]]}),
        ("step", {"batch_id": 1, "batch": [{"messages": [], "completion": "x", "reward": 1}]}),
        ("step", {"batch_id": 1, "batch": [{"messages": [{}], "completion": {}, "reward": 1}]}),
        ("checkpoint", {"checkpoint_name": "../best"}),
        ("checkpoint", {"checkpoint_name": "a/b"}),
        ("checkpoint", {"checkpoint_name": ""}),
    ],
)
def test_a12_what_cannot_be_meant_is_400(shared: Wire, route: str, body: dict[str, object]) -> None:
    job = shared.begin()["job_id"]
    assert shared.refused(route, job_id=job, **body)[0] == 400
    assert shared.gateway.http.post(f"{PREFIXES[0]}/{route}", content=b"[1]").status_code == 400


def test_a12_a_jobs_names_mean_the_newest_policy_while_it_works_and_what_they_meant_afterwards(
    shared,
) -> None:
    begun = shared.begin()
    job, name = begun["job_id"], begun["current_model"]
    assert name == f"{job}@s0"

    def answered_by(model: str) -> str:
        answer = shared.gateway.chat(model=f"openai/arbor:{model}")
        assert answer.status_code == 200, answer.text
        return answer.headers["x-slipway-policy-version"]

    versions = [answered_by(name)]
    names = [name]
    for number in range(2):
        names.append(shared.round(job, [shared.group(f"named {number}", names[-1])])["current_model"])
        shared.settled(job)
        versions.append(answered_by(names[-1]))
    assert names == [f"{job}@s{number}" for number in range(3)] and len(set(versions)) == 3
    assert [answered_by(one) for one in names] == versions
    ended = shared.ask("terminate", job_id=job)["current_model"]
    assert ended == f"{job}@v{versions[-1]}" and answered_by(ended) == versions[-1]
    assert answered_by(job) == str(shared.gateway.status()["version"])
    assert shared.gateway.chat(model=f"arbor:{job}@s").status_code == 404
    assert shared.gateway.chat(model="arbor:grpo:policy:brave-otter-00000000:20261121@s0").status_code == 404


def test_a12_a_checkpoint_pins_what_is_committed_and_says_so_in_arbors_words(own) -> None:
    it: Wire = own()
    job = it.begin()["job_id"]
    at_first = it.ask("checkpoint", job_id=job, checkpoint_name="before")
    assert at_first["checkpoints"]["before"]["global_step"] == 0
    it.round(job, [it.group("one")])
    it.settled(job)
    body = {"job_id": job, "checkpoint_name": "model_checkpoint_best", "metadata": {"score": 59.0}}
    saved = [it.ask("checkpoint", **body) for _ in range(2)]
    assert saved[0] == saved[1]
    kept = saved[0]["checkpoints"][saved[0]["last_checkpoint"]]
    assert (kept["checkpoint_name"], kept["global_step"], kept["metadata"]) == (
        "model_checkpoint_best", 1, {"score": 59.0},
    )  # fmt: skip
    assert [one["pinned"] for one in it.gateway.http.get("/slipway/checkpoints").json()] == [True]
    best = json.loads((it.folder / "checkpoints" / "best.json").read_text())
    assert best["checkpoint"] == "step-000001" and best["of"] in job
    it.gateway.kill()
    it.restart()
    assert it.ask("checkpoint", **body)["checkpoints"] == saved[0]["checkpoints"]


# ---------------------------------------------------------------------- A13


def test_a13_a_gateway_killed_while_a_round_trains_goes_on_with_its_jobs(own) -> None:
    it: Wire = own()
    job = it.begin()["job_id"]
    it.trainer.go.clear()
    sent = it.round(job, [it.group("one"), it.group("two")])
    wait_until(lambda: it.gateway.http.get("/slipway/steps").json())
    it.gateway.kill()
    it.restart()
    # Its round is the next: the one before was given to the queue.
    it.send(job, 7, it.group("late", sent["current_model"]))
    it.trainer.go.set()
    said = it.settled(job)
    assert said["metrics"]["rounds_trained"] == 2 and len(it.trained) == 3 * GENERATIONS
    assert len(it.gateway.http.get("/slipway/steps").json()) == 2
    # What was sent, and neither closed nor trained, is trained too, by whatever the client asks next.
    it.send(job, it.pending(job)[0], it.group("three", sent["current_model"]))
    it.gateway.kill()
    it.restart()
    assert it.ask("terminate", job_id=job)["metrics"]["rounds_trained"] == 3
    assert len(it.trained) == len(set(it.trained)) == 4 * GENERATIONS


def test_a13_a_step_that_failed_is_an_error_at_everything_the_client_asks_next(own) -> None:
    it: Wire = own()
    job = it.begin()["job_id"]
    it.trainer.fails = "the loss is not finite"
    it.round(job, [it.group("one")])
    wait_until(lambda: it.post("status", job_id=job).status_code != 200)
    for route in ("status", "terminate", "checkpoint", "cancel"):
        status, code, words = it.refused(route, job_id=job, checkpoint_name="x")
        assert (status, code) == (500, "step_failed") and "the loss is not finite" in words, route
    assert it.refused("step", job_id=job, batch=it.group("x"), batch_id=1)[0] == 500
    it.gateway.kill()
    it.restart()
    assert it.refused("terminate", job_id=job)[0] == 500
    it.trainer.fails = None
    job = it.begin()["job_id"]
    it.round(job, [it.group("two")])
    assert it.ask("terminate", job_id=job)["metrics"]["rounds_trained"] == 1


def test_a13_a_job_of_a_lost_machine_and_one_of_a_failed_runtime_are_errors(own) -> None:
    it: Wire = own()
    job = it.begin()["job_id"]
    it.gateway.kill()
    shutil.rmtree(it.folder / "arbor")
    said = {"to_step": 0, "time": time.time(), "client_state": None}
    (it.folder / "rewound.json").write_text(json.dumps(said))
    it.restart()
    for route in ("status", "step", "terminate"):
        body = {"job_id": job, "batch": it.group("x"), "batch_id": 1}
        assert it.refused(route, **body)[:2] == (409, "rewound"), route
    assert it.gateway.chat(model=f"arbor:{job}@s0").status_code == 404
    fresh = it.begin()["job_id"]
    it.pending(fresh)
    supervisor = {"phase": "failed", "children": [], "detail": "the trainer failed for good"}
    write_json(it.folder / "supervisor.json", supervisor)
    for route in ("status", "step", "initialize"):
        body = {"job_id": fresh, "batch": it.group("y"), "batch_id": 1, "model": "policy"}
        status, _, words = it.refused(route, **body)
        assert status == 503 and "the trainer failed for good" in words, route


def test_a13_a_client_that_trained_nothing_is_not_told_that_all_went_well(shared) -> None:
    # Every rollout failed, so that it sent no group at all.
    job = shared.begin()["job_id"]
    shared.pending(job)
    for _ in range(2):
        status, code, words = shared.refused("terminate", job_id=job)
        assert (status, code) == (422, "nothing_trained") and "no group was ever sent" in words
    # What it sent had nothing to train: said, and no error before it goes on for too long.
    job = shared.begin()["job_id"]
    group = [one | {"reward": None} for one in shared.group("never judged")]
    for number in range(MOST_UNTRAINED - 1):
        shared.round(job, [[one | {"number": number} for one in group]])
    said = shared.settled(job)
    assert said["metrics"]["rounds"] == MOST_UNTRAINED - 1 and said["metrics"]["rounds_trained"] == 0
    assert said["last_round"]["kind"] == "nothing"
    assert f"{GENERATIONS} no reward" in said["last_round"]["error"]
    shared.round(job, [group])
    wait_until(lambda: shared.post("status", job_id=job).status_code != 200)
    status, code, words = shared.refused("status", job_id=job)
    assert (status, code) == (422, "nothing_to_train") and f"{MOST_UNTRAINED} rounds" in words
