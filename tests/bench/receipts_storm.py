"""Clients with short time-outs while `launch` stands still, again and again: a rollout trains once (C52).

    python -m tests.bench.receipts_storm [--rounds 20] [--log FILE]     (launcher's environment, 10 min)

One run on the embedded model serves all rounds. In each, 40 clients of the `openai` SDK ask, give up after
5 seconds and ask again; some time later, another one each round, the `launch` process, in which the relay
lives, is stopped for 12 s; then what was answered is trained, in a real step. Prints a JSON line a round:
what the clients were answered, what the step's record and its batch say was trained, `problems` where the two
differ, and ends with 1 at the first of those. Rounds that FILE has are not made again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from launcher.base.home import Home
from launcher.client import Session, connect, group
from launcher.records.endpoint import LocalEndpoint
from launcher.records.records import RecordStore
from runtime.shared.batch import read_batch
from runtime.tiny.chat import messages
from runtime.tiny.grammar import training_phrases
from tests.e2e.conftest import make_home
from tests.support.at_rest import stands_still
from tests.support.launched import Launched
from tests.support.ports import free_port
from tests.support.waiting import wait_until

CLIENTS = 40
# A group's members are asked the same, and no two have the same reward.
GROUP = 5
TIMEOUT_SECONDS = 5.0
RETRIES = 20
ANSWER_SECONDS = 600.0
STOPPED_SECONDS = 12.0
# When it is stopped: as shares of the time in which all are answered when nothing happens.
DELAYS = (0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9)
NAME = "storm"
# The rewards are none: the policy is to stay what it is.
LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class Round:
    """What the clients saw, and what was trained of it.

    `requests`: sent, retries included. `samples`, `trained`, `dropped`, `unreceived`: by the step's counts;
    `measured`: what the trainer says it trained. `sequences`: in the step's batch; `twice`: rollouts with
    more than one of them; `foreign`: those that are not what their rollout's client was answered.
    """

    answered: int
    requests: int
    step: int
    samples: int
    trained: int
    measured: int
    unreceived: int
    dropped: dict[str, int]
    sequences: int
    twice: int
    foreign: int

    @property
    def problems(self) -> list[str]:
        """Where what was trained is not what was answered; empty where all is well."""
        trained = {self.samples, self.trained, self.measured, self.sequences}
        found = {
            "trained is not what was answered": trained != {self.answered},
            "samples were dropped": bool(self.dropped),
            "a rollout was trained twice": self.twice > 0,
            "another answer was trained than was received": self.foreign > 0,
        }
        return [what for what, is_so in found.items() if is_so]


class Storm:
    """The clients of one run, whose `launch` is stopped in a round and goes on."""

    def __init__(self, launched: Launched, name: str) -> None:
        store = RecordStore(Home(launched.home, launched.home, launched.home))
        found = LocalEndpoint.of(store.load(name), store)
        self._launched = launched
        self._session: Session = connect(found.base_url, found.token)
        self._clients = [self._client() for _ in range(CLIENTS)]
        self._phrases = training_phrases(CLIENTS // GROUP, seed=3)
        # One entry for each request that is sent: appending is atomic, counting is not.
        self._sent: list[None] = []
        self._asked: list[Future[str]] = []

    @property
    def requests(self) -> int:
        """Sent so far, in all rounds, retries included."""
        return len(self._sent)

    @property
    def waiting(self) -> int:
        """Clients of this round that have no answer yet."""
        return CLIENTS - sum(it.done() for it in self._asked)

    def round(self, until_stopped: Callable[[], Any], until_resumed: Callable[[], Any]) -> Round:
        """All clients ask, `launch` stands still from the return of the one call to that of the other.

        Raises what the SDK raises where a client is never answered.
        """
        before = self.requests
        rollouts = [self._session.new_rollout() for _ in range(CLIENTS)]
        with ThreadPoolExecutor(CLIENTS) as pool:
            self._asked = [pool.submit(self._ask, place, it) for place, it in enumerate(rollouts)]
            until_stopped()
            with self._stopped():
                until_resumed()
            answers = [it.result(ANSWER_SECONDS) for it in self._asked]
        return self._trained(dict(zip(rollouts, answers, strict=True)), self.requests - before)

    def calm(self) -> float:
        """How many seconds all clients' answers take when nothing happens; the first of them warm up."""
        for _ in range(2):
            begun = time.monotonic()
            with ThreadPoolExecutor(CLIENTS) as pool:
                rollouts = [self._session.new_rollout() for _ in range(CLIENTS)]
                list(pool.map(self._ask, range(CLIENTS), rollouts))
        return time.monotonic() - begun

    def close(self) -> None:
        for client in self._clients:
            client.close()

    # ------------------------------------------------------------- a round

    def _client(self) -> openai.OpenAI:
        http = httpx.Client(verify=False, trust_env=False, event_hooks={"request": [self._note]})
        return openai.OpenAI(
            base_url=self._session.base_url,
            api_key=self._session.api_key,
            timeout=TIMEOUT_SECONDS,
            max_retries=RETRIES,
            http_client=http,
        )

    def _note(self, request: httpx.Request) -> None:
        self._sent.append(None)

    def _ask(self, place: int, rollout: str) -> str:
        """One rollout of one call; the id of its answer."""
        client = self._clients[place].with_options(base_url=self._session.rollout_url(rollout))
        asked: Any = messages("english", "french", self._phrases[place // GROUP].english)
        answer = client.chat.completions.create(
            model="policy", messages=asked, max_tokens=64, temperature=1.0
        )
        return answer.id

    @contextlib.contextmanager
    def _stopped(self) -> Iterator[None]:
        launch = self._launched.process_handle()
        launch.suspend()
        try:
            wait_until(lambda: stands_still(launch.pid))
            yield
        finally:
            launch.resume()

    # ------------------------------------------------------------- what was trained

    def _trained(self, answers: dict[str, str], requests: int) -> Round:
        """Train a step on these rollouts; `answers`: of each, the id of what its client was answered."""
        rollouts = list(answers)
        groups = [
            group(
                f"{NAME}-{first}",
                {it: float(place) for place, it in enumerate(rollouts[first : first + GROUP])},
            )
            for first in range(0, CLIENTS, GROUP)
        ]
        status = self._session.step(groups)
        (line,) = (it for it in self._session.metrics(after=status.id - 1) if it["step"] == status.id)
        trained = self._in_batch(status.id)
        times = Counter(rollout for rollout, _ in trained)
        received = self._received(answers)
        return Round(
            answered=len(answers),
            requests=requests,
            step=status.id,
            samples=status.counts.samples,
            trained=status.counts.trained,
            measured=line["counts"]["trained"],
            unreceived=status.counts.unreceived,
            dropped=status.counts.dropped,
            sequences=len(trained),
            twice=sum(count > 1 for count in times.values()),
            foreign=sum(ids != received.get(rollout) for rollout, ids in trained),
        )

    @property
    def _machine(self) -> Path:
        return self._launched.run_dir / "machine"

    def _in_batch(self, step: int) -> list[tuple[str, list[int]]]:
        """Of each sequence that a step was given: its rollout, and the token ids that were sampled."""
        batch = read_batch(self._machine / "steps" / f"{step:06d}")
        found = []
        for place, listed in enumerate(batch.meta["samples"]):
            span = batch.span(place)
            ids = batch.tokens[span][batch.sampled[span] == 1]
            found.append((listed["rollout"], ids.tolist()))
        return found

    def _received(self, answers: dict[str, str]) -> dict[str, list[int]]:
        """By rollout: the token ids of the answer that its client has, as the gateway recorded them."""
        found = {}
        for path in sorted((self._machine / "samples").glob("*.jsonl")):
            for line in map(json.loads, path.read_text().splitlines()):
                rollout = (line.get("tags") or {}).get("rollout")
                if rollout in answers and line["answer"]["id"] == answers[rollout]:
                    (sample,) = line["samples"]
                    found[rollout] = sample["completion_ids"]
        return found


@contextlib.contextmanager
def storm_on_a_run() -> Iterator[Storm]:
    """`launch` without a program, until Ctrl-C."""
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        words = ["--name", NAME, "--port", str(free_port()), "--set", f"train.learning_rate={LEARNING_RATE}"]
        launched = Launched(make_home(Path(folder) / "home"), words)
        try:
            launched.wait_for_text("ready: http", 900)
            with contextlib.closing(Storm(launched, NAME)) as storm:
                yield storm
            launched.interrupt()
            assert launched.wait(900) == 130, launched.stderr
        finally:
            if launched.process.poll() is None:
                launched.kill_tree()


def main() -> int:
    parser = argparse.ArgumentParser(description="Stop launch under clients with short time-outs.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--log", type=Path, help="where rounds are kept, and gone on from")
    asked = parser.parse_args()
    seen = asked.log.read_text().splitlines() if asked.log and asked.log.exists() else []
    if len(seen) >= asked.rounds:
        return 0
    with storm_on_a_run() as storm:
        calm_seconds = storm.calm()
        for number in range(len(seen), asked.rounds):
            delay_seconds = DELAYS[number % len(DELAYS)] * calm_seconds
            begun = time.monotonic()
            made = storm.round(lambda seconds=delay_seconds: time.sleep(seconds), _stand_still)
            line = json.dumps(
                {
                    "round": number + 1,
                    "delay_seconds": round(delay_seconds, 3),
                    "calm_seconds": round(calm_seconds, 3),
                    "stopped_seconds": STOPPED_SECONDS,
                    **asdict(made),
                    "problems": made.problems,
                    "seconds": round(time.monotonic() - begun, 1),
                    "load": round(os.getloadavg()[0], 1),
                }
            )
            print(line, flush=True)
            if made.problems:
                return 1
            if asked.log:
                with asked.log.open("a") as log:
                    log.write(line + "\n")
    return 0


def _stand_still() -> None:
    time.sleep(STOPPED_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
