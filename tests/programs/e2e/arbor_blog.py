"""A program with the calls of the page on RL in a DSPy course, in their order and spelling; the task is ours.

    launch --arbor -- python arbor_blog.py [--steps N] [--learning-rate X]

As there: `dspy.configure` and no `set_lm`, an LM with neither a key nor settings, a module without
`super().__init__()`, a metric that says yes or no, a training set of a few written examples with the
validation set cut out of it, LoRA as an object of PEFT's, `checkpoint=` a folder. Ours are the imports, the
numbers of GPUs, and `Predict` in place of `ChainOfThought`: the tiny model has not learnt to reason. It is
judged by phrases that are in no training. What it found is left in `blog.json` in the run's folder.
"""

import argparse
import json
from pathlib import Path

import arbor  # under `launch --arbor` it is on the path
import dspy
from arbor import ArborProvider
from dspy.evaluate import Evaluate
from dspy.teleprompt import ArborGRPO
from peft import LoraConfig  # of `launch --arbor`, where PEFT is not installed

from examples.quickstart import phrases

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2)
parser.add_argument("--learning-rate", type=float, default=5e-6)
parser.add_argument("--more", type=int, default=0, help="examples beside the two written ones")
parser.add_argument("--held-out", type=int, default=8)
parser.add_argument("--seed", type=int, default=0)
asked = parser.parse_args()

# The server, which here is the run
arbor.init()
model_name = "tiny"
server_info = arbor.start_server(model_name)

lm = dspy.LM(model=f"openai/arbor:{model_name}", provider=ArborProvider(), api_base=server_info["base_url"])
dspy.configure(lm=lm)


class SimpleTranslation(dspy.Module):
    def __init__(self):
        self.translate = dspy.Predict("english -> french")

    def forward(self, english):
        return self.translate(english=english)


def right(example, prediction, trace=None) -> bool:
    return example.french == " ".join(prediction.french.lower().split())


program = SimpleTranslation()
trainset = [
    dspy.Example(english="the black cat", french="le chat noir").with_inputs("english"),
    dspy.Example(english="a green house", french="une maison verte").with_inputs("english"),
    # "hundreds more", as the page says, where they are asked for
    *phrases(asked.more, asked.seed, held_out=False),
]
devset = trainset[:50]

lora_config = LoraConfig(
    r=16, lora_alpha=16, target_modules="all-linear", lora_dropout=0.05, bias="none", task_type="CAUSAL_LM"
)
train_kwargs = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "temperature": 1.0,
    "learning_rate": asked.learning_rate,
    "lora_config": lora_config,
    "num_training_gpus": 1,
    "num_inference_gpus": 1,
    "loss_type": "dapo",
    "report_to": "wandb",
}

held_out = phrases(asked.held_out, 0, held_out=True)
evaluator = Evaluate(devset=held_out, metric=right, num_threads=4, display_progress=True)
before = evaluator(program).score

compiler = ArborGRPO(
    metric=right,
    num_dspy_examples_per_grpo_step=8,
    num_rollouts_per_grpo_step=4,
    exclude_demos=True,
    num_train_steps=asked.steps,
    seed=asked.seed,
    checkpoint="checkpoints/rl_qa",
    train_kwargs=train_kwargs,
)
optimized_program = compiler.compile(student=program, trainset=trainset, valset=devset)

after = evaluator(optimized_program).score
print(f"Before: {before}%, after: {after}%")
found = {
    "before": before,
    "after": after,
    "scores": {str(step): score for step, score in compiler.validation_scores.items()},
    "report": compiler.report.to_dict(),
}
(Path(server_info["storage_path"]) / "blog.json").write_text(json.dumps(found, indent=2) + "\n")
