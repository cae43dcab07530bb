"""Arbor's own two files for DSPy, loaded as they are, train a program of two modules here (A10).

No adapter is set: what is sampled is one form of text, what the client sends back another. Once the answers
are scripted, with all that makes such texts hard to tell; once the whole product is at work.
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

from tests.support.arbor_files import arbor_files
from tests.support.environment import PROGRAMS, runtime_environ, runtime_python
from tests.support.launched import Launched
from tests.support.ports import free_port
from tests.support.relay_process import RelayProcess

pytestmark = pytest.mark.slow

PROGRAM = PROGRAMS / "e2e" / "arbor_client.py"
TOKEN = "token-of-the-tests"
_SECONDS = 300


class World:
    """A run whose engine is scripted, and a relay in front of it that asks this user for no key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        self._process = subprocess.Popen(
            [runtime_python(), PROGRAMS / "runtime" / "arbor_world.py", self.folder],
            env=runtime_environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._relay = RelayProcess(Path(self._said()), TOKEN, folder / "relay.log", keyless=True)

    def fail(self, why: str) -> None:
        """Have every step fail from now on; "": none."""
        assert self._process.stdin
        self._process.stdin.write(f"{why}\n")
        self._process.stdin.flush()
        assert self._said() == "so be it"

    def client(self, place: Path) -> subprocess.CompletedProcess[str]:
        """The client's life."""
        return subprocess.run(
            [sys.executable, PROGRAM, arbor_files(), f"{self._relay.url}/v1/", "rich"],
            env={**os.environ, "DSPY_CACHEDIR": str(place / "cache")}, cwd=place, capture_output=True,
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


def test_a10_arbors_own_files_train_on_what_was_sampled_whatever_form_they_send_it_back_in(
    world: World, tmp_path: Path
) -> None:
    done = world.client(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    check(json.loads(done.stdout.splitlines()[-1]), world.folder)


def test_a13_a_step_that_failed_is_raised_by_arbors_own_files(world: World, tmp_path: Path) -> None:
    world.fail("the loss is not finite")
    done = world.client(tmp_path)
    world.fail("")
    assert done.returncode != 0 and "the loss is not finite" in done.stderr, done.stdout + done.stderr


def test_a10_so_they_do_with_the_whole_product_at_work(home: Path, tmp_path: Path) -> None:
    arguments = ["--arbor", "--port", str(free_port()), "--"]
    program = [sys.executable, str(PROGRAM), str(arbor_files()), "launched", "phrases"]
    launched = Launched(home, [*arguments, *program], environ={"DSPY_CACHEDIR": str(tmp_path / "cache")})
    try:
        assert launched.wait(900) == 0, launched.stdout + launched.stderr
        machine = launched.run_dir / "machine"
        check(launched.events[-1], machine)
        # What the client said in Python is what its steps used, each at its place in the job's schedule.
        lines = [json.loads(line) for line in (machine / "metrics.jsonl").open()]
        used = [
            [line["settings"][key] for key in ("learning_rate", "loss", "schedule_step")] for line in lines
        ]
        assert used == [[1e-4, "dapo", number] for number in range(3)]
        scores = [json.loads(line)["score"] for line in (machine / "validations.jsonl").open()]
        assert len(scores) == 3 and sorted(scores) == scores
    finally:
        launched.kill_tree()


def check(said: dict[str, Any], state: Path) -> None:
    """What must hold of a run that such a client has trained, and the figures of it."""
    name = said["job"].split(":")[2]
    job = json.loads((state / "arbor" / name / "job.json").read_text())
    rounds = list(job["outcomes"].values())
    files = (state / "arbor" / name / "rounds").glob("*.jsonl")
    sent = {digest for file in files for line in file.open() for digest in json.loads(line)["contents"]}
    counts = [one["counts"] for one in rounds]
    dropped = sum((Counter(one["dropped"]) for one in counts), Counter())
    members = sum(one["members"] for one in counts)
    retokenised = sum(one["retokenised"] for one in counts)
    unmapped = retokenised + sum(n for why, n in dropped.items() if why.startswith(("text not", "no sample")))
    batches = [json.loads(path.read_text()) for path in sorted(state.glob("steps/[0-9]*/batch.json"))]
    batches = [batch for batch in batches if batch["key"].startswith(f"arbor:{name}:")]
    trained = [sample["id"] for batch in batches for sample in batch["samples"]]
    groups = sum(one["groups"] for one in rounds if one["kind"] == "trained")
    figures = {
        "rounds": len(rounds), "groups rolled out": said["groups"],
        "groups sent": len(sent), "groups trained": groups,
        "members": members, "mapped": f"{1 - unmapped / members:.1%}",
        "retokenised": f"{retokenised / members:.1%}", "samples trained": len(trained),
        "trained twice": len(trained) - len(set(trained)), "stale": dropped["stale"],
        "dropped": dict(dropped), "validations": said["validations"],
        "checkpoints": sorted(said["checkpoints"]), "copies": sum(one["copies"] for one in rounds),
    }  # fmt: skip
    print(json.dumps(figures))
    assert not said["torch"]
    assert [one["kind"] for one in rounds] == ["trained"] * 3, figures
    # Of a module that a rollout never came to the client makes no group.
    assert groups == len(sent) >= said["groups"] / 2, figures
    assert unmapped <= 0.01 * members and retokenised <= 0.01 * members, figures
    assert len(trained) == len(set(trained)) and not dropped["stale"], figures
    assert len(said["validations"]) == 4 and job["metrics"]["validation_score"] is not None
    names = [f"model_checkpoint_step_{number}" for number in (1, 2, 3)]
    assert [said["checkpoints"][name]["global_step"] for name in names] == [0, 1, 2], figures
    assert set(job["checkpoints"]) == {*names}
    assert said["model"].startswith(f"openai/arbor:{said['job']}@v")
