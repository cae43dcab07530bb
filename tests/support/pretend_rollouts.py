"""A pretend policy and a program for tests of the loop: what it answers depends on rollout, call and version.

Neighbours: `small_run.py` serves it. So two loops that ask for the same rollouts of the same versions have
the same answers, rewards and bodies, in whatever order they asked. `bodies` are the steps as they were sent,
without what is drawn anew for each compile: the part of its rollouts' ids, its own id, and the steps' keys.
`Traced` notes what was answered as well: with the steps that is all that a trainer hears of a loop.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from typing import Any

import dspy

from launcher.client import GRPO, PolicyLM, connect
from launcher.client.wire import Patience
from tests.support.small_run import CUT_OFF, TOKEN, Answer, Asked, SmallRun

Sampled = tuple[str, str, int, bool]
_ROLLOUT = re.compile(r"^(\w+)-(s\d+-e\d+-k\d+)$")


def key_of(rollout: str) -> tuple[int, int]:
    """The step that a rollout was planned for, and its example there."""
    _, step, example, _ = rollout.split("-")
    return int(step[1:]), int(example[1:])


def drawn(asked: Asked, kinds: int) -> int:
    """A number below `kinds`, by rollout, predictor, call and version."""
    rollout = asked.tag("rollout") or ""
    found = _ROLLOUT.match(rollout)
    who = found[2] if found else rollout.rpartition("-")[2]  # of a validation: its place in the set
    text = f"{who}/{asked.tag('predictor')}/{asked.tag('call')}/{asked.version}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) % kinds


def form(asked: Asked, text: str) -> str:
    name = "check" if asked.tag("predictor") == "judge" else "french"
    return f"[[ ## {name} ## ]]\n{text}\n\n[[ ## completed ## ]]"


def plain(asked: Asked) -> str:
    """An answer of one to seven letters."""
    return form(asked, "a" * (1 + drawn(asked, 7)))


def mostly_flat(asked: Asked) -> str:
    """All members of most examples answer the same, so that nothing is to learn from these."""
    step, example = key_of(asked.tag("rollout") or "") if asked.tag("purpose") != "eval" else (0, 0)
    varied = (7 * step + 3 * example) % 4 == 0
    return form(asked, "a" * (1 + drawn(asked, 7) if varied else 3))


def troubled(asked: Asked) -> str | tuple[int, dict[str, Any]]:
    """One in ten is lost, one does not parse, one is cut off, and one is what the metric cannot judge."""
    kind = drawn(asked, 10)
    if kind == 0:
        return 500, {"error": {"message": "the engine fell", "type": "t", "param": None, "code": None}}
    if kind == 1:
        return "I would rather not"
    if kind == 2:
        return form(asked, "aa") + CUT_OFF
    return form(asked, "none" if kind == 3 else "raise" if kind == 4 else "a" * kind)


class Traced:
    """Answers as another does, and notes each answer to a rollout that is trained, in their order."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        # By version: the rollout, its predictor, the call, and whether the answer was cut off.
        self._sampled: dict[int, list[Sampled]] = {}

    def __call__(self, asked: Asked) -> str | tuple[int, dict[str, Any]]:
        text = self._answer(asked)
        if isinstance(text, str) and asked.tag("purpose") != "eval":
            tags = (asked.tag("rollout") or "", asked.tag("predictor") or "", int(asked.tag("call") or 0))
            with self._lock:
                self._sampled.setdefault(asked.version or 0, []).append((*tags, text.endswith(CUT_OFF)))
        return text

    def steps(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each step, and what was sampled since the one before: at staleness 0, by the version it trains."""
        return [{"sampled": self._sampled[at], "body": body} for at, body in enumerate(bodies)]


class Twice(dspy.Module):
    """Two predictors, the second of which a run asks once or twice."""

    def __init__(self) -> None:
        super().__init__()
        self.write = dspy.Predict("english -> french")
        self.judge = dspy.Predict("french -> check")

    def forward(self, english: str) -> dspy.Prediction:
        french = self.write(english=english).french
        if french == "raise":
            raise RuntimeError("the program fell")
        checks = [self.judge(french=french).check for _ in range(1 + len(french) % 2)]
        return dspy.Prediction(french=french, check=checks[-1])


def metric(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float | None:
    if "none" in (prediction.french, prediction.get("check")):
        return None
    return float(len(prediction.french) + len(prediction.get("check") or ""))


def data(count: int) -> list[dspy.Example]:
    return [dspy.Example(english=f"word {i} end", french="").with_inputs("english") for i in range(count)]


def optimizer(**changes: Any) -> GRPO:
    """Five steps of three examples, four rollouts each, scored by `metric`."""
    settings: dict[str, Any] = {
        "num_train_steps": 5,
        "num_dspy_examples_per_grpo_step": 3,
        "num_rollouts_per_grpo_step": 4,
        "num_steps_for_val": 2,
        "seed": 3,
    }
    return GRPO(changes.pop("metric", metric), **{**settings, **changes})


def train(run: SmallRun, program: dspy.Module | None = None, valset: int = 3, **changes: Any) -> GRPO:
    """Compile on twelve examples."""
    student = program or dspy.Predict("english -> french")
    # An answer may be held for longer than other tests have patience.
    session = connect(run.base_url, TOKEN, Patience(answer_seconds=90.0, away_seconds=5.0))
    student.set_lm(PolicyLM(session))
    grpo = optimizer(**changes)
    grpo.compile(student, trainset=data(12), valset=data(valset))
    return grpo


def bodies(run: SmallRun) -> list[str]:
    """The steps that were sent, in their order, as JSON."""
    return [_normal(it) for it in sent(run)]


def sent(run: SmallRun) -> list[dict[str, Any]]:
    """The steps as they were sent, with all that was drawn for this compile."""
    return [json.loads(request.model_dump_json()) for _, request in sorted(run.requests.items())]


def digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]


def digests(run: SmallRun) -> list[str]:
    return [digest(it) for it in bodies(run)]


def _normal(body: dict[str, Any]) -> str:
    state = body["client_state"]
    body["key"], state["work"]["program"] = "KEY", "PROGRAM"
    text = json.dumps(body).replace(state["id"], "COMPILE")
    token = body["groups"][0]["id"].partition("/")[0]
    return text.replace(token, "TOKEN")
