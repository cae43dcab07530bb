"""The client's copies of the bodies say what the runtime's say, and are all that a program needs of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from launcher.client import group, request_bodies
from launcher.client import schema as client_schema
from runtime.shared import schema, statuses
from tests import generate
from tests.support.environment import PROGRAMS
from tests.support.small_run import SmallRun

READ = ["StepCounts", "StepStatus", "CheckpointInfo", "ChildState", "RuntimeStatus"]


def form(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema, without the words."""
    return without_words(model.model_json_schema())


def without_words(node: Any) -> Any:
    if isinstance(node, dict):
        return {name: without_words(it) for name, it in node.items() if name != "description"}
    return [without_words(it) for it in node] if isinstance(node, list) else node


def test_what_is_sent_is_a_copy_of_the_runtimes_bodies() -> None:
    assert generate.COPY.read_text() == generate.made(), "python -m tests.generate"


@pytest.mark.parametrize("name", ["StepSettings", "StepRequest", "Validation", "RestoreRequest"])
def test_the_copy_has_the_runtimes_very_form(name: str) -> None:
    """The settings of a step have no text there that could be copied."""
    assert form(getattr(request_bodies, name)) == form(getattr(schema, name))


def test_every_body_that_is_read_is_compared() -> None:
    found = {it for it in vars(client_schema).values() if isinstance(it, type) and issubclass(it, BaseModel)}
    assert {it.__name__ for it in found} == {"ResponseBody", *READ}


@pytest.mark.parametrize("name", READ)
def test_what_is_read_is_a_part_of_what_the_runtime_answers(name: str) -> None:
    """Keys are only ever added there."""
    ours, theirs = form(getattr(client_schema, name)), form(getattr(statuses, name))
    for field, its_form in ours["properties"].items():
        assert its_form == theirs["properties"][field]
    assert set(ours.get("required", ())) <= set(theirs.get("required", ()))


@pytest.mark.parametrize(
    "fields",
    [
        {"rollout": "r", "reward": float("nan")},
        {"rollout": "r", "reward": float("inf"), "call": 3, "predictor": "self"},
        {"rollout": "r", "failure": "no reward"},
        {"messages": [{"role": "user", "content": "hi"}], "completion": "ho", "reward": 1.0},
        {"sample": "s", "reward": 0.0},
    ],
)
def test_c22_a_member_arrives_as_it_was_sent(fields: dict[str, Any]) -> None:
    group_sent = request_bodies.Group(id="g", members=[request_bodies.Member(**fields)])
    sent = request_bodies.StepRequest(key="k", groups=[group_sent])
    text = sent.model_dump_json()
    assert schema.StepRequest.model_validate_json(text).model_dump_json() == text


@pytest.mark.parametrize(
    "fields",
    [{}, {"rollout": "r", "sample": "s"}, {"messages": [{"role": "user"}]}, {"rollout": "r", "rewrad": 1.0}],
)
def test_what_the_runtime_refuses_is_refused_before_it_is_sent(fields: dict[str, Any]) -> None:
    for of in (request_bodies, schema):
        with pytest.raises(ValidationError):
            of.Member(**fields)


@pytest.mark.parametrize("both", [True, False], ids=["both", "neither"])
def test_a_step_learns_from_rewards_or_by_imitation(both: bool) -> None:
    for of in (request_bodies, schema):
        groups = [of.Group(id="g", members=[of.Member(rollout="r", reward=1.0)])] if both else []
        said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
        with pytest.raises(ValidationError, match="not both"):
            of.StepRequest(
                key="k", groups=groups, examples=[of.SupervisedExample(messages=said)] if both else []
            )


def nested(depth: int) -> dict[str, Any]:
    return {"x": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    "state", [{"x": float("nan")}, {"x": "\ud800"}, nested(70)], ids=["nan", "half a character", "deep"]
)
def test_a_client_state_that_is_no_plain_json_is_refused_alike(state: dict[str, Any]) -> None:
    for of in (request_bodies, schema):
        with pytest.raises(ValidationError):
            of.RestoreRequest(key="k", client_state=state)


def test_groups_of_the_runtimes_own_form_can_still_be_sent(run: SmallRun) -> None:
    run.refuse_empty = False
    members = [schema.Member(rollout="r1", reward=1.0), schema.Member(rollout="r2", failure="away")]
    session = run.session()
    session.step([schema.Group(id="g", members=members), group("h", {"r3": 0.5})])  # type: ignore[list-item]
    assert [it.id for it in run.requests[1].groups] == ["g", "h"]
    assert run.requests[1].groups[0].members == members


@pytest.mark.slow
@pytest.mark.parametrize("beside", ["runtime.py", "runtime/__init__.py"])
def test_a_users_file_beside_the_program_hides_nothing_of_the_client(tmp_path: Path, beside: str) -> None:
    (tmp_path / beside).parent.mkdir(exist_ok=True)
    (tmp_path / beside).write_text("raise SystemExit('this is the file of the user')\n")
    program = shutil.copy(PROGRAMS / "unit" / "import_everything.py", tmp_path)
    done = subprocess.run(
        [sys.executable, program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
