"""The other side of a comparison: TRL's GRPOTrainer on the same task, with transformers' own `generate`.

    python trl_program.py TASK LOG

It runs in an environment of its own, where nothing of `launcher` is but the folder of our side's programs.
What the task says is the same as ours; all else is TRL's default, but for what would only slow a model of a
million parameters down: no gradient checkpointing, no bfloat16 on a CPU. Neighbours: `trl_side.py` starts it,
`parsed_answer.py` reads answers as DSPy does; `launcher/bench/programs/slipway_program.py` is our side.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from parsed_answer import french_of, reward
from peft import LoraConfig
from scored_answer import letters
from side_log import SideLog
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Steps(TrainerCallback):
    """Each step with its times and rewards; the rollouts of a step end where their rewards are asked for."""

    def __init__(self, log: SideLog, task: dict[str, Any]) -> None:
        self.__name__ = "letters"  # TRL names what it logs by it
        self.end_tokens: set[int] = set()
        self._log, self._task = log, task
        self._began = self._rolled_out = 0.0
        self._rewards: list[float] = []

    def __call__(self, completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        """The rewards, as TRL asks for them."""
        self._rolled_out = time.time()
        self._rewards = [
            reward(answer[0]["content"], cut_off=not ids or ids[-1] not in self.end_tokens)
            for answer, ids in zip(completions, completion_ids, strict=True)
        ]
        return self._rewards

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.time()

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        ended, score = time.time(), fmean(self._rewards)
        self._log.write(
            "step",
            step=state.global_step,
            ended=ended,
            reward=score,
            rollout_seconds=self._rolled_out - self._began,
            training_seconds=ended - self._rolled_out,
        )
        print(f"step {state.global_step}/{self._task['steps']} · reward {score:.3f}", file=sys.stderr)


def main(task_file: Path, log_file: Path) -> None:
    task: dict[str, Any] = json.loads(task_file.read_text(encoding="utf-8"))
    log = SideLog(log_file)
    trainer = made(task, log, log_file.parent)
    with log.span("evaluation") as told:
        told["score"] = evaluated(trainer, task)
    with log.span("training"):
        trainer.train()
    with log.span("evaluation") as told:
        told["score"] = evaluated(trainer, task)
    asked = trainer.args
    named = ("loss_type", "scale_rewards", "beta", "epsilon", "num_iterations", "max_grad_norm", "optim")
    settings = {name: str(getattr(asked, name)) for name in named}
    log.write("settings", settings=settings | {"threads": torch.get_num_threads()})


def made(task: dict[str, Any], log: SideLog, folder: Path) -> GRPOTrainer:
    """The trainer, before its first step."""
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=task["steps"],
        per_device_train_batch_size=task["examples"] * task["rollouts"],
        num_generations=task["rollouts"],
        max_completion_length=task["answer_tokens"],
        learning_rate=task["learning_rate"],
        lr_scheduler_type="constant",
        seed=task["seed"],
        model_init_kwargs={"dtype": "float32"},
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    lora = LoraConfig(
        r=task["rank"], lora_alpha=task["alpha"], target_modules="all-linear", task_type="CAUSAL_LM"
    )
    steps = Steps(log, task)
    trainer = GRPOTrainer(
        model=task["model"],
        reward_funcs=steps,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": prompt(task, text)} for text in task["train"]]),
        peft_config=lora,
        callbacks=[steps],
    )
    steps.end_tokens = set(trainer.eos_token_ids)
    return trainer


def prompt(task: dict[str, Any], text: str) -> list[dict[str, str]]:
    """What DSPy asks for one input."""
    return [
        {"role": "system", "content": task["system"]},
        {"role": "user", "content": task["user"].replace("{english}", text)},
    ]


def evaluated(trainer: GRPOTrainer, task: dict[str, Any]) -> float:
    """The mean score of the held-out inputs, greedily; an answer that does not parse has none."""
    tokenizer: Any = trainer.processing_class
    model: Any = trainer.model
    inputs = tokenizer.apply_chat_template(
        [prompt(task, text) for text in task["held_out"]],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        padding=True,
        padding_side="left",
    )
    model.eval()
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=task["answer_tokens"], do_sample=False)
    answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return fmean(letters(french_of(answer) or "") for answer in answers)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
