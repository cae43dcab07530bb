"""DSPy's own GRPO trains a program of two modules on what was sampled, whatever form that comes in (A10).

No adapter is set: what is sampled is one form of text, what is given back another. The answers are scripted,
with all that makes such texts hard to tell; the whole product is at work in test_trained_by_dspy.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.environment import PROGRAMS, runtime_environ, runtime_python
from tests.support.relay_process import RelayProcess

pytestmark = pytest.mark.slow

TOKEN = "token-of-the-tests"
_SECONDS = 300


class World:
    """A run whose engine is scripted, and a relay in front of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        self._process = subprocess.Popen(
            [runtime_python(), PROGRAMS / "runtime" / "rich_world.py", self.folder],
            env=runtime_environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._relay = RelayProcess(Path(self._said()), TOKEN, folder / "relay.log")

    def fail(self, why: str) -> None:
        """Have every step fail from now on; "": none."""
        assert self._process.stdin
        self._process.stdin.write(f"{why}\n")
        self._process.stdin.flush()
        assert self._said() == "so be it"

    def program(self, place: Path) -> subprocess.CompletedProcess[str]:
        """The program's life."""
        ours = {"LAUNCH_BASE_URL": f"{self._relay.url}/v1", "LAUNCH_API_KEY": TOKEN}
        return subprocess.run(
            [sys.executable, PROGRAMS / "e2e" / "dspys_grpo_rich.py"],
            env={**os.environ, **ours, "DSPY_CACHEDIR": str(place / "cache")}, cwd=place, capture_output=True,
            text=True, timeout=_SECONDS,
        )  # fmt: skip

    def close(self) -> None:
        self._relay.stop()
        self._process.communicate(timeout=60)

    def _said(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline().strip()
        assert line, "the world has ended"
        return line


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("world"))
    yield world
    world.close()


def test_a10_dspys_grpo_trains_on_what_was_sampled_whatever_form_it_gives_it_back_in(
    world: World, tmp_path: Path
) -> None:
    done = world.program(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    check(json.loads(done.stdout.splitlines()[-1]), world.folder)


def test_a13_a_step_that_failed_is_raised_out_of_dspys_grpo(world: World, tmp_path: Path) -> None:
    world.fail("the loss is not finite")
    done = world.program(tmp_path)
    world.fail("")
    assert done.returncode != 0 and "the loss is not finite" in done.stderr, done.stdout + done.stderr


def check(said: dict[str, Any], state: Path) -> None:
    """What must hold of a run that such a program has trained, and the figures of it."""
    counts = said["counts"]
    dropped = sum((Counter(one["dropped"]) for one in counts), Counter())
    members = sum(one["members"] for one in counts)
    groups = sum(one["groups"] for one in counts)
    retokenised = sum(one["retokenised"] for one in counts)
    unmapped = retokenised + sum(n for why, n in dropped.items() if why.startswith(("text not", "no sample")))
    batches = [json.loads(path.read_text()) for path in sorted(state.glob("steps/[0-9]*/batch.json"))]
    trained = [sample["id"] for batch in batches for sample in batch["samples"]]
    figures = {
        "groups rolled out": said["groups"], "groups trained": groups, "members": members,
        "mapped": f"{1 - unmapped / members:.1%}", "retokenised": f"{retokenised / members:.1%}",
        "samples trained": len(trained), "trained twice": len(trained) - len(set(trained)),
        "dropped": dict(dropped),
    }  # fmt: skip
    print(json.dumps(figures))
    assert not said["torch"] and len(counts) == 3, figures
    # Of a module that a rollout never came to DSPy makes no group.
    assert said["groups"] >= groups >= said["groups"] / 2, figures
    assert unmapped <= 0.01 * members and retokenised <= 0.01 * members, figures
    assert len(trained) == len(set(trained)) and not dropped["stale"], figures
