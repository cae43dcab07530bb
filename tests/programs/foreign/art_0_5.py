"""A program for openpipe-art 0.5.18 as its users write one, whose backend is this run: the one changed line.

    python art_0_5.py TASKS.json STEPS LEARNING_RATE

TASKS.json: questions for training and for validation, each with its right answer. The last line that it
prints is what it found.
"""

import asyncio
import json
import sys
from pathlib import Path

import art

from launcher.client.art import SlipwayBackend

tasks = json.loads(Path(sys.argv[1]).read_text())
steps, learning_rate = int(sys.argv[2]), float(sys.argv[3])
backend = SlipwayBackend()
model = art.TrainableModel(name="agent-001", project="french", base_model="tiny")
prompted = art.Model(name="prompted", project="french", inference_model_name="base")
found: dict = {"sampled": [], "steps": [], "rewards": [], "named": None}


def reward_of(said, right):
    """The share of its right words, in their places."""
    words, wanted = said.split(), right.split()
    return sum(a == b for a, b in zip(words, wanted, strict=False)) / max(len(words), len(wanted), 1)


def text_of(choice):
    parts = (choice.message.content or "").split("## ]]")
    return parts[1].split("[[")[0] if len(parts) > 1 else ""


async def ask(asked, task):
    answer = await asked.openai_client().chat.completions.create(
        model=asked.get_inference_name(), messages=task["messages"], max_tokens=48, temperature=1.0
    )
    return answer.choices[0]


async def rollout(asked, task, place=0):
    if place == 99:
        raise RuntimeError("a tool broke")
    choice = await ask(asked, task)
    trajectory = art.Trajectory(
        messages_and_choices=[*task["messages"], choice], metadata={"task": task["messages"][-1]["content"]}
    )
    if place == 1:  # the same conversation, held a second time
        again = await ask(asked, task)
        trajectory.additional_histories.append(
            art.trajectories.History(messages_and_choices=[*task["messages"], again])
        )
    trajectory.reward = reward_of(text_of(choice), task["right"])
    return trajectory.finish()


def history_of(logged):
    return Path(logged._get_output_dir(), "history.jsonl").read_text().splitlines()


def samples_of(groups):
    return [
        choice.model_extra["slipway"]["sample"]
        for group in groups
        for trajectory in group
        for history in (trajectory, *trajectory.additional_histories)
        for choice in history.messages_and_choices
        if not isinstance(choice, dict) and "slipway" in choice.model_extra
    ]


def nameless(choice):
    """A choice as libraries rebuild it, ART's own for LiteLLM among them."""
    return type(choice).model_validate(choice.model_dump(include={"finish_reason", "index", "message"}))


async def judged(group):
    """A judge's turn behind each history: another model's choice."""
    for trajectory in group:
        other = trajectory.messages_and_choices[-1].model_copy(deep=True)
        other.model_extra.pop("slipway", None)
        trajectory.metrics["judged"] = 1.0
        trajectory.messages_and_choices.append(other)
    return group


def without_judge(groups):
    for group in groups:
        for trajectory in group:
            del trajectory.messages_and_choices[-1]
    return groups


async def main():
    await model.register(backend)
    prompted.inference_base_url, prompted.inference_api_key = (
        model.inference_base_url,
        model.inference_api_key,
    )
    await prompted.register(backend)
    size = len(tasks["train"]) // steps
    for number in range(steps):
        batch = tasks["train"][number * size : (number + 1) * size]
        places = (*range(6), 99) if number == 0 else range(6)
        groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(rollout(model, task, place) for place in places) for task in batch),
            pbar_desc="train", max_exceptions=len(batch), after_each=judged if number == 0 else None,
        )  # fmt: skip
        found["sampled"].append([0, samples_of(groups)])
        if number == 0:
            for group in groups:
                for trajectory in group.trajectories[2:4]:
                    trajectory.messages_and_choices[-2] = nameless(trajectory.messages_and_choices[-2])
        result = await backend.train(model, groups, learning_rate=learning_rate, loss_fn="ppo", verbose=True)
        groups = without_judge(groups) if number == 0 else groups
        found["sampled"][-1][0] = result.step
        found["rewards"].append(sum(one.reward for group in groups for one in group) / sum(map(len, groups)))
        await model.log(groups, split="train", metrics=result.metrics, step=result.step)
        val = [art.TrajectoryGroup([await rollout(model, task)]) for task in tasks["val"]]
        await model.log(val, split="val")
        found["steps"].append(await model.get_step())
        await model.delete_checkpoints()
    model.merge_state({"done": steps})
    lines = [
        art.Trajectory(
            messages_and_choices=[*task["messages"], {"role": "assistant", "content": task["whole"]}]
        )
        for task in tasks["val"]
    ]
    await model.train_sft(
        lines, config=art.TrainSFTConfig(learning_rate=[1e-4, 1e-4], batch_size=len(lines) // 2)
    )
    found["steps"].append(await model.get_step())
    compared = [art.TrajectoryGroup([await rollout(prompted, task)]) for task in tasks["val"][:2]]
    await prompted.log(compared, split="val")
    named = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(step=found["steps"][-2]),
        messages=tasks["val"][0]["messages"],
        max_tokens=4,
    )
    found["named"] = named.model
    await backend.close()
    history = [json.loads(line) for line in history_of(model)]
    found["history"] = [sorted(line) for line in history]
    found["prompted"] = len(history_of(prompted))
    found["state"] = model.read_state()["done"]
    found["torch"] = "torch" in sys.modules
    print(json.dumps(found))


asyncio.run(main())
