"""What the gateway says of a rollout's samples: their names in order, and why one cannot be trained."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from fastapi import FastAPI
from fastapi.testclient import TestClient

from runtime.gateway.samples.rollout_samples import sample_routes
from runtime.gateway.samples.samples import SampleStore
from tests.runtime.recorded import answer, asked, choice, record, sampled

CONTENT = answer([1, 2], choice([3], [-0.5]), choice([4], [-0.25], index=1))


def test_b03_the_samples_of_a_rollout_have_names_and_what_cannot_be_trained_a_reason(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    late = record(store, asked("late", "r", n=2), CONTENT, version=1, delivered=False)
    held = sampled(store, "r", version=2, top_p=0.5)
    judged = sampled(store, "r", x_slipway_purpose="eval", x_slipway_predictor="judge")
    sampled(store, "another")
    app = FastAPI()
    app.include_router(sample_routes(store))
    client = TestClient(app)
    said = client.get("/slipway/rollouts/r/samples").json()
    assert [it["sample"] for it in said] == [*late, *held, *judged]
    assert [it["received"] for it in said] == [False, False, True, True]
    assert [it["version"] for it in said] == [1, 1, 2, 0]
    assert [bool(it["unscorable"]) for it in said] == [False, False, True, False]
    assert (said[3]["predictor"], said[3]["purpose"]) == ("judge", "eval")
    receipt = {"request": "late", "state": "received"}
    assert client.post("/slipway/receipts", json={"receipts": [receipt]}).status_code == 204
    assert all(it["received"] for it in client.get("/slipway/rollouts/r/samples").json())
    assert client.get("/slipway/rollouts/nobody/samples").json() == []


def test_b03_a_rollout_may_have_any_name_that_a_header_may_have(tmp_path: Path) -> None:
    """As `connect().rollout("task/3")` asks for it."""
    store = SampleStore(tmp_path)
    app = FastAPI()
    app.include_router(sample_routes(store))
    for name in ("task/3", "task/3/samples", "50% of it?"):
        made = sampled(store, name)
        said = TestClient(app).get(f"/slipway/rollouts/{quote(name, safe='')}/samples")
        assert (said.status_code, [it["sample"] for it in said.json()]) == (200, made)
