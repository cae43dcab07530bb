"""AutoRL: a policy trained for a task from its description alone.

    done = await autorl("Sum up a letter to a landlord in one sentence.", run, judge="openai/o3")
    print(done.verdict)

Inputs are written by a language model, each is answered several times with the task as the system prompt,
RULER scores the answers, and the step is trained. At the end the held-out inputs are answered again and
compared with the answers from before. A program that begins again in the same run goes on where it was, with
the same inputs. Neighbours: `scenario_generation.py`, `pairwise_comparison.py`, `launcher/client/ruler/`.
Knows nothing of engines or trainers.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.base.sanitize import plain_text as sanitized
from launcher.client.autorl.pairwise_comparison import HELD_OUT_RUBRIC, AnswerPair, BeforeAfter, compare
from launcher.client.autorl.policy_sampling import PolicySampler
from launcher.client.autorl.scenario_generation import Scenarios, scenarios
from launcher.client.request_bodies import TrainSettings, Validation
from launcher.client.ruler.judge_prompt import DEFAULT_RUBRIC
from launcher.client.ruler.judge_retries import Tries
from launcher.client.ruler.judge_usage import Usage
from launcher.client.ruler.judges import resolve_judge
from launcher.client.ruler.score_group import DEFAULT_JUDGE, ruler_score_group
from launcher.client.session import Session, connect
from launcher.client.trajectories.gathering import gather_trajectory_groups
from launcher.client.trajectories.results import StepResult
from launcher.client.trajectories.trajectory_group import TrajectoryGroup

# In the run's folder: the inputs, and the answers to the held-out ones from before.
START_FILE = "autorl.json"
# In the program's state: how many steps were asked for.
STEP_KEY = "autorl_step"


@dataclass(frozen=True)
class AutoRL:
    """The result. `steps` are those that this program took."""

    scenarios: Scenarios
    steps: list[StepResult]
    verdict: BeforeAfter


@dataclass(frozen=True)
class AutoRLStart:
    """The scenarios and the held-out answers from before the first step."""

    arguments: list[Any]
    scenarios: Scenarios
    before: list[str]


async def autorl(
    task: str,
    run: Session | None = None,
    *,
    judge: Any = DEFAULT_JUDGE,
    n: int = 40,
    validation: int | None = None,
    steps: int = 10,
    groups_per_step: int = 4,
    rollouts: int = 6,
    rubric: str = DEFAULT_RUBRIC,
    held_out_rubric: str = HELD_OUT_RUBRIC,
    seed: int = 0,
    at_once: int = 32,
    extra_litellm_params: Mapping[str, Any] | None = None,
    tries: Tries | None = None,
    **settings: Any,
) -> AutoRL:
    """Train the run's policy for this task, and report whether it answers better than before.

    `judge` writes the inputs, scores (by `rubric`) and compares (by `held_out_rubric`, which must be another
    one). `settings`: of each step, as `run.train` takes them. Raises the errors of judges and of `run.train`.
    """
    if unknown := sorted(settings.keys() - {*TrainSettings.__annotations__, "timeout_seconds"}):
        raise TypeError(f"autorl() got an unexpected keyword argument {unknown[0]!r}")
    if rubric.strip() == held_out_rubric.strip():
        raise ValueError("held_out_rubric must be another text than rubric: it would find what was rewarded")
    run = run or await asyncio.to_thread(connect)
    tries = tries or Tries()
    answering = PolicySampler(run, task, at_once)
    state = await asyncio.to_thread(run.read_state)
    begun = _load_start(run.run_dir, arguments := [task, n, validation, seed])
    if begun is None:
        sampled = {"extra_litellm_params": extra_litellm_params, "tries": tries}
        wrote = await scenarios(task, n, judge, validation=validation, seed=seed, **sampled)
        begun = AutoRLStart(arguments, wrote, await answering.greedy_answers(wrote.validation))
        _save_start(run.run_dir, begun)
        state = {}
    score = _RulerScorer(judge, extra_litellm_params, rubric, tries)
    taken: list[StepResult] = []
    for step in range(state.get(STEP_KEY, 0), steps):
        chosen = scenarios_for_step(step, begun.scenarios.train, groups_per_step, seed)
        groups = await gather_trajectory_groups(
            [TrajectoryGroup(answering.rollout(one) for _ in range(rollouts)) for one in chosen],
            pbar_desc=f"step {step + 1}",
            after_each=score.group,
        )
        await asyncio.to_thread(run.log, groups, "train")
        taken.append(await run.train_async(groups, state={STEP_KEY: step + 1}, **settings))
    after = await answering.greedy_answers(begun.scenarios.validation)
    pairs = [AnswerPair(*them) for them in zip(begun.scenarios.validation, begun.before, after, strict=True)]
    verdict = await compare(
        pairs, task, resolve_judge(judge, extra_litellm_params), held_out_rubric, tries, at_once
    )
    await asyncio.to_thread(_report_verdict, run, verdict)
    return AutoRL(begun.scenarios, taken, verdict)


def scenarios_for_step(step: int, inputs: Sequence[str], count: int, seed: int) -> list[str]:
    """The inputs of a step: all of them once, in an order of the seed's, before any comes again."""
    chosen: list[str] = []
    for place in range(step * count, (step + 1) * count):
        turn, within = divmod(place, len(inputs))
        ordered = list(inputs)
        random.Random(f"{seed}/{turn}").shuffle(ordered)
        chosen.append(ordered[within])
    return chosen


@dataclass(frozen=True)
class _RulerScorer:
    judge: Any
    extra_params: Mapping[str, Any] | None
    rubric: str
    tries: Tries

    async def group(self, group: TrajectoryGroup) -> TrajectoryGroup:
        return await ruler_score_group(group, self.judge, self.extra_params, self.rubric, tries=self.tries)


def _report_verdict(run: Session, verdict: BeforeAfter) -> None:
    sys.stderr.write(f"slipway: AutoRL: {sanitized(str(verdict))}\n")
    sys.stderr.flush()
    if verdict.share is not None:
        judged = len(verdict.outcomes) - verdict.count("not judged")
        status = run.status()
        run.validated(
            Validation(
                step=status.step,
                name="better_than_before",
                score=verdict.share,
                examples=judged,
                version=status.version,
            )
        )


def _load_start(folder: Path | None, arguments: list[Any]) -> AutoRLStart | None:
    """The start of an earlier life of this program, if its arguments were the same."""
    try:
        saved = json.loads((folder / START_FILE).read_text()) if folder is not None else None
    except (OSError, ValueError):
        return None
    if saved is None or saved["asked"] != arguments:
        return None
    wrote = saved["scenarios"]
    return AutoRLStart(arguments, Scenarios(**wrote | {"usage": Usage(**wrote["usage"])}), saved["before"])


def _save_start(folder: Path | None, begun: AutoRLStart) -> None:
    if folder is None:
        return
    content = {"asked": begun.arguments, "scenarios": asdict(begun.scenarios), "before": begun.before}
    part = folder / f".{START_FILE}"
    part.write_text(json.dumps(content, indent=1))
    part.replace(folder / START_FILE)
