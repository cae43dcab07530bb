"""A program written for Arbor, in the order and the spelling of its README, with text and numbers of our own.

    launch --arbor -- python arbor_quickstart.py [--steps N] [--examples N] [--learning-rate X]

A test also runs it with the two import lines changed, without --arbor. What it found is left in
`quickstart.json` in the run's folder.
"""

import argparse
import json
import random
from pathlib import Path

import arbor  # under `launch --arbor` it is on the path
import dspy
from arbor import ArborGRPO, ArborProvider

from examples.quickstart import phrases

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2)
parser.add_argument("--learning-rate", type=float, default=1e-6)
parser.add_argument("--seed", type=int, default=43)
parser.add_argument("--examples", type=int, default=4)
parser.add_argument("--held-out", type=int, default=8)
asked = parser.parse_args()

# The server, which here is the run
server_info = arbor.init()

# The data, shuffled and split
raw_data = phrases(240, asked.seed, held_out=False)
random.Random(asked.seed).shuffle(raw_data)
trainset = raw_data
valset = phrases(asked.held_out, 0, held_out=True)

# The task
translate_program = dspy.Predict("english -> french")

# The model, through Arbor's provider
provider = ArborProvider()
student_lm_name = "tiny"
lm = dspy.LM(
    model=f"openai/arbor:{student_lm_name}",
    provider=provider,
    api_base=server_info["base_url"],
    api_key="arbor",
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    repetition_penalty=1.0,
    max_tokens=64,
)
translate_program.set_lm(lm)


def right(example, pred, trace=None) -> float:
    """1 for the right translation, else 0."""
    return float(" ".join(pred.french.lower().split()) == example.french)


train_kwargs = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 24 / 6,
    "temperature": 1.0,
    "top_k": -1,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "beta": 0.00,
    "learning_rate": asked.learning_rate,
    "gradient_checkpointing": True,
    "fp16": True,
    "lr_scheduler_type": "constant_with_warmup",
    "loss_type": "dapo",
    "max_steps": 1000,
    "report_to": "wandb",
    "log_completions": True,
    "logging_steps": 1,
    "max_prompt_length": None,
    "max_completion_length": None,
    "scale_rewards": False,
    "max_grad_norm": 1.0,
    "lora_config": {
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "r": 8,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"],
    },
    "num_training_gpus": 1,
    "num_inference_gpus": 1,
    "weight_decay": 0.001,
}

compiler = ArborGRPO(
    metric=right,
    num_dspy_examples_per_grpo_step=asked.examples,
    num_rollouts_per_grpo_step=8,
    exclude_demos=True,
    num_train_steps=asked.steps,
    num_threads=16,
    use_train_as_val=False,
    num_steps_for_val=10,
    train_kwargs=train_kwargs,
    checkpoint="single-best",
)

optimized_translate = compiler.compile(student=translate_program, trainset=trainset, valset=valset)

answer = optimized_translate(english=valset[0].english)
print(answer.french)
found = {
    "module": arbor.__file__,
    "info": server_info,
    "scores": {str(step): score for step, score in compiler.validation_scores.items()},
    "best": [compiler.best_validation_step, compiler.best_validation_score],
    "job": compiler.job.id,
    "answer": answer.french,
}
(Path(server_info["storage_path"]) / "quickstart.json").write_text(json.dumps(found, indent=2) + "\n")
