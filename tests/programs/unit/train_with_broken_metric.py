"""A real program with a real optimizer whose metric always raises: `train_with_broken_metric.py ASKED`.

Its endpoint is the small one of the client's tests. The file ASKED gets how often it asked the policy.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import dspy

from launcher.client import GRPO
from tests.support.small_run import TOKEN, SmallRun


def metric(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> float:
    raise KeyError("no such column")


def main(asked: Path) -> None:
    run = SmallRun()
    os.environ |= {"LAUNCH_BASE_URL": run.base_url, "LAUNCH_API_KEY": TOKEN}
    data = [dspy.Example(english="hello").with_inputs("english")]
    try:
        GRPO(metric, num_train_steps=1000).compile(dspy.Predict("english -> french"), trainset=data)
    finally:
        asked.write_text(str(len(run.asked)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
