"""What a run has learned, used after it: exported, merged, begun with; and a run that Python holds."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from launcher.base.home import Home
from launcher.client import Session, connect, group
from launcher.client.failures import NotConnected
from launcher.client.request_bodies import StepSettings
from launcher.records.records import RecordStore
from runtime import bootstrap, tether
from runtime.shared import processes
from tests.support.environment import PROGRAMS
from tests.support.launched import Launched, processes_of
from tests.support.ports import free_port
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

PROMPT = [{"role": "user", "content": "the red cat"}]
# In fp32, over the few tokens of an answer.
EXACT = 1e-3
# vLLM by itself would take nine tenths of the computer for its cache, and compile what is asked twice.
_SMALL = ("--kv-cache-memory-bytes", str(64 * 2**20), "--enforce-eager")
_SPARING = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def this_home(pupil: Launched) -> Any:
    """`launch` of this process and of what it starts looks where the shared run is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAUNCH_HOME", str(pupil.home))
        yield


@dataclass(frozen=True)
class Served:
    """One answer as it was served: its ids with those of its prompt, and the logprobs of its own."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]


def served(base_url: str, api_key: str, model: str) -> Served:
    with openai.OpenAI(base_url=base_url, api_key=api_key, timeout=600, max_retries=0) as client:
        answer = client.chat.completions.create(
            model=model, messages=PROMPT, max_tokens=12, temperature=0, logprobs=True,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
    choice = answer.choices[0]
    assert choice.logprobs and choice.logprobs.content and choice.model_extra and answer.model_extra
    prompt = choice.model_extra.get("prompt_token_ids") or answer.model_extra["prompt_token_ids"]
    logprobs = [token.logprob for token in choice.logprobs.content]
    return Served(prompt, choice.model_extra["token_ids"], logprobs)


def train_a_step(run: Session) -> int:
    """One step in which answers with other letters earn more; the version that it made."""
    rewards = {}
    for _ in range(8):
        rollout = run.new_rollout()
        with openai.OpenAI(base_url=run.rollout_url(rollout), api_key=run.api_key) as client:
            answer = client.chat.completions.create(model=run.model, messages=PROMPT, max_tokens=12)
        rewards[rollout] = float(len(set(answer.choices[0].message.content or "")))
    version = run.step([group("g", rewards)], settings=StepSettings(overlong="keep")).version
    assert version is not None
    return version


@pytest.fixture(scope="module")
def learned(this_home: None) -> tuple[str, Served]:
    """The shared run, found by its name, and what its newest version answers after some steps."""
    run = connect("shared")
    version = [train_a_step(run) for _ in range(3)][-1]
    return f"shared@{version}", served(run.base_url, run.api_key, f"policy@v{version}")


def export(run: str, to: Path, *options: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli.main", "export", run, "--to", str(to), "--json", *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def exported(learned: tuple[str, Served], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `launch export` said of the adapter and of the merged model."""
    folder = tmp_path_factory.mktemp("exported")
    forms: dict[str, tuple[str, ...]] = {"adapter": (), "merged": ("--merge",)}
    return {form: export(learned[0], folder / form, *options) for form, options in forms.items()}


def python_of_the_runtime() -> str:
    return str(bootstrap.ensure_environment(Home.find().environments, "cpu"))


def in_the_runtime(program: str, *words: str) -> Any:
    """What a program prints that runs with the runtime's Python and without our code."""
    done = subprocess.run(
        [python_of_the_runtime(), str(PROGRAMS / "runtime" / program), *words],
        capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@dataclass(frozen=True)
class PlainServer:
    """vLLM by itself, nothing of ours in it, started by the line that the export gave."""

    process: subprocess.Popen[bytes]
    base_url: str
    log: Path

    def ready(self) -> bool:
        """Whether it answers yet. Fails with what it said where it has ended."""
        assert self.process.poll() is None, self.log.read_text()
        try:
            openai.OpenAI(base_url=self.base_url, api_key="none", timeout=5, max_retries=0).models.list()
        except openai.APIConnectionError:
            return False
        return True


@contextmanager
def served_plainly(line: str) -> Iterator[PlainServer]:
    """It ends here with all it has started, or with this process: it is on a tether."""
    model, *options = shlex.split(line.removeprefix("vllm serve "))
    port = free_port()
    # The script `vllm` asks for its version by a package's name that vllm-cpu has not: the same server.
    words = [python_of_the_runtime(), "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options]
    words += ["--host", "127.0.0.1", "--port", str(port), *_SMALL]
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | _SPARING
    # A short path: what it leaves in there are Unix sockets.
    with tempfile.TemporaryDirectory(prefix="plain-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as said:
            process = subprocess.Popen(
                tether.command(words, grace_seconds=10), cwd=folder, env=environ | {"TMPDIR": folder},
                stdout=said, stderr=said, preexec_fn=processes.preexec(signal.SIGTERM),
            )  # fmt: skip
        try:
            yield PlainServer(process, f"http://127.0.0.1:{port}/v1", log)
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="module")
def plain_adapter(exported: dict[str, Any]) -> Iterator[PlainServer]:
    """It comes up while other tests of this file run."""
    with served_plainly(exported["adapter"]["serve"]) as server:
        yield server


@pytest.fixture(scope="module")
def plain_merged(exported: dict[str, Any]) -> Iterator[PlainServer]:
    with served_plainly(exported["merged"]["serve"]) as server:
        yield server


def apart(found: list[float], wanted: list[float]) -> float:
    """The largest difference of two answers' logprobs; of as many tokens."""
    assert len(found) == len(wanted)
    return max(abs(a - b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.usefixtures("plain_adapter")
def test_b19_what_is_exported_has_the_served_logprobs(
    learned: tuple[str, Served], exported: dict[str, Any]
) -> None:
    answer, forms = learned[1], ("adapter", "merged")
    assert [exported[form]["merged"] for form in forms] == [False, True]
    ids = json.dumps(answer.prompt + answer.ids)
    of_peft = in_the_runtime("logprobs_of.py", ids, *(exported[form]["into"] for form in forms))
    for found in of_peft:
        assert apart(found[len(answer.prompt) - 1 :], answer.logprobs) < EXACT


def test_b19_a_run_begins_there_and_a_killed_python_leaves_nothing_of_it(
    learned: tuple[str, Served], pupil: Launched
) -> None:
    run, answer = learned
    program = subprocess.Popen(
        [sys.executable, PROGRAMS / "e2e" / "started_run.py", run], stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    try:
        said = json.loads(program.stdout.readline())
        begun = served(said["base_url"], said["api_key"], "policy")
        assert begun.ids == answer.ids and apart(begun.logprobs, answer.logprobs) < EXACT
        assert connect("started").run_id == said["run"]
    finally:
        program.kill()  # -9: it can tidy nothing up
        program.wait()
        program.stdout.close()
    store = RecordStore(Home(pupil.home, pupil.home, pupil.home))
    wait_until(lambda: not store.load(said["run"]).live, 120, "the run is proven to be down")
    assert (store.load(said["run"]).proof or {})["verified"]
    assert not processes_of(said["run"])


# In every run, the merged model's logprobs are computed without vLLM (above).
@pytest.mark.parametrize("form", ["adapter", pytest.param("merged", marks=pytest.mark.long)])
def test_b19_vllm_by_itself_answers_by_the_exports_line_as_the_run_did(
    learned: tuple[str, Served], exported: dict[str, Any], request: pytest.FixtureRequest, form: str
) -> None:
    answer, said = learned[1], exported[form]
    server: PlainServer = request.getfixturevalue(f"plain_{form}")
    wait_until(server.ready, 600, server.log.read_text)
    plain = served(server.base_url, "none", "policy" if form == "adapter" else said["into"])
    assert (plain.prompt, plain.ids) == (answer.prompt, answer.ids)
    assert apart(plain.logprobs, answer.logprobs) < EXACT
    if form == "adapter":
        base = served(server.base_url, "none", said["base"])
        assert base.ids != answer.ids or apart(base.logprobs, answer.logprobs) > EXACT, "nothing was learned"


def test_b19_a_run_that_is_not_there_is_said_with_what_is(this_home: None) -> None:
    with pytest.raises(NotConnected, match="did you mean shared"):
        connect("share")
