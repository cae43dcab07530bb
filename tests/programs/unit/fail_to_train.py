"""A training whose program always raises, which nobody catches."""

from typing import Any

import dspy

from launcher.client import GRPO, PolicyLM, connect


class Program(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ask = dspy.Predict("english -> french")

    def forward(self, english: str) -> Any:
        self.ask(english=english)
        if english:
            raise ZeroDivisionError("as programs do")


def main() -> None:
    program = Program()
    program.set_lm(PolicyLM(connect()))
    data = [dspy.Example(english=f"word {i}", french="mot").with_inputs("english") for i in range(2)]
    metric = lambda example, prediction, trace=None: 1.0  # noqa: E731
    optimizer = GRPO(metric, num_dspy_examples_per_grpo_step=2, num_rollouts_per_grpo_step=4)
    optimizer.compile(program, trainset=data)


if __name__ == "__main__":
    main()
