"""The installed OpenEnv: its server holds an environment, its client plays it, and the policy learns there.

In an environment of its own, since a release of it needs a newer click than our `cloud` extra has.
"""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.environment import REPOSITORY
from tests.support.foreign_environments import OPENENV, python_with
from tests.support.launched import Launched
from tests.support.ports import free_port
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

EXAMPLES = REPOSITORY / "examples"
# An episode's phrases, and the episodes of a step.
TURNS, EPISODES = 2, 64
_SECONDS = 900
_LONG_SECONDS = 1800
# An episode's reward is in [0, 1]: the mean of 64 has a standard error of 1/16 at most.
_TWO_ERRORS = 2 * (2 / 16**2) ** 0.5


@pytest.fixture(scope="module")
def quiz() -> Iterator[str]:
    """The address of the environment, in OpenEnv's own server."""
    port = free_port()
    with subprocess.Popen([python_with(OPENENV), EXAMPLES / "quiz_env" / "server.py", str(port)]) as server:
        try:
            wait_until(lambda: _is_served(port), what="the environment is served")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def _is_served(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.fixture
def launched(home: Path, quiz: str) -> Iterator[Launched]:
    """The example in a run of its own, by the Python that has OpenEnv."""
    program = [str(python_with(OPENENV)), str(EXAMPLES / "openenv_env.py"), quiz]
    launched = Launched(
        home, ["--port", str(free_port()), "--", *program], environ={"PYTHONPATH": str(REPOSITORY)}
    )
    try:
        yield launched
    finally:
        launched.kill_tree()


def test_b04_each_episode_in_an_openenv_environment_is_trained_as_one_conversation(
    launched: Launched,
) -> None:
    launched.wait_for_text("step 1: mean reward 0.", _SECONDS)
    line = json.loads((launched.run_dir / "machine" / "metrics.jsonl").read_text().splitlines()[0])
    counts = line["counts"]
    assert counts["samples"] == counts["trained"] + sum(counts["dropped"].values()) == TURNS * EPISODES
    assert set(counts["dropped"]) <= {"no variance in its group"}
    # At a temperature of 1 some answers have no end: a turn after one is apart.
    assert counts["turns_joined"] > counts["sealed"] and set(counts["sealed_by"]) <= {"cut off"}
    launched.interrupt()
    assert launched.wait(_SECONDS) == 130


def test_b04_what_an_openenv_environment_rewards_shows_on_held_out_phrases(launched: Launched) -> None:
    assert launched.wait(_LONG_SECONDS) == 0, launched.stdout + launched.stderr
    found = re.search(r"^held-out: (\S+) → (\S+)", launched.stdout, re.MULTILINE)
    assert found is not None
    print(found[0])
    assert float(found[2]) - float(found[1]) > _TWO_ERRORS
