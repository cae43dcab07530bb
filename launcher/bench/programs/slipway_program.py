"""The program that `launch bench` runs with `launch --`.

    python slipway_program.py TASK LOG

A DSPy program that is trained by `GRPO`, scored greedily before and after and never in between. The run's own
files have the times of the steps. Neighbours: `launcher/bench/slipway_side.py` starts it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import dspy
from request_cost import measure_routes
from scored_answer import letters
from side_log import SideLog

from launcher.client import GRPO, PolicyLM, connect, evaluate


def metric(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> int:
    """The reward of an answer that parses; `GRPO` has one for the others."""
    return letters(prediction.french)


def main(task_file: Path, log_file: Path) -> None:
    task: dict[str, Any] = json.loads(task_file.read_text(encoding="utf-8"))
    log = SideLog(log_file)
    run = connect()
    program = dspy.Predict("english -> french")
    program.set_lm(PolicyLM(run, max_tokens=task["answer_tokens"]))
    train, held_out = (
        [dspy.Example(english=text).with_inputs("english") for text in task[part]]
        for part in ("train", "held_out")
    )
    staleness = {} if task["staleness"] is None else {"staleness": task["staleness"]}
    optimizer = GRPO(
        metric,
        num_train_steps=task["steps"],
        num_dspy_examples_per_grpo_step=task["examples"],
        num_rollouts_per_grpo_step=task["rollouts"],
        checkpoint="none",
        seed=task["seed"],
        **staleness,
    )
    with log.span("evaluation") as told:
        told["score"] = evaluate(program, held_out, metric).score
    with log.span("training") as told:
        program = optimizer.compile(program, trainset=train)
        told["staleness"] = optimizer.staleness
    with log.span("evaluation") as told:
        told["score"] = evaluate(program, held_out, metric).score
    if task["requests"] is not None:
        with log.span("requests") as told:
            told["measured"] = measure_routes(run, task)
    log.write("settings", settings=run.status().settings)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
