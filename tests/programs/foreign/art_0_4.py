"""A program for openpipe-art 0.4.11, as notebooks of 2025 have it: its own client, and an address.

    python art_0_4.py TASKS.json STEPS LEARNING_RATE ADDRESS

The last line that it prints is what it found.
"""

import asyncio
import json
import sys
from pathlib import Path

import art
import httpx

tasks = json.loads(Path(sys.argv[1]).read_text())
steps, learning_rate = int(sys.argv[2]), float(sys.argv[3])
backend = art.Backend(base_url=sys.argv[4])
model = art.TrainableModel(name="agent-001", project="french", base_model="tiny")
groups: list = []
found: dict = {"said": [], "steps": [], "rewards": []}


def reward_of(said, right):
    """The share of its right words, in their places."""
    words, wanted = said.split(), right.split()
    return sum(a == b for a, b in zip(words, wanted, strict=False)) / max(len(words), len(wanted), 1)


async def rollout(model, task):
    client = model.openai_client()
    answer = await client.chat.completions.create(
        model=model.name, messages=task["messages"], max_tokens=48, temperature=1.0
    )
    choice = answer.choices[0]
    said = (choice.message.content or "").split("## ]]")
    trajectory = art.Trajectory(messages_and_choices=[*task["messages"], choice], reward=0.0)
    trajectory.reward = reward_of(said[1].split("[[")[0] if len(said) > 1 else "", task["right"])
    return trajectory


async def main():
    global groups
    await model.register(backend)
    size = len(tasks["train"]) // steps
    for number in range(steps):
        batch = tasks["train"][number * size : (number + 1) * size]
        groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(rollout(model, task) for _ in range(6)) for task in batch),
            pbar_desc="gather", max_exceptions=1,
        )  # fmt: skip
        await model.train(groups, config=art.TrainConfig(learning_rate=learning_rate))
        said = [
            [str(place), one.messages_and_choices[-1].message.content or "", one.reward]
            for place, group in enumerate(groups)
            for one in group
        ]
        found["steps"].append(await model.get_step())
        found["said"].append([found["steps"][-1], said])
        found["rewards"].append(sum(one.reward for group in groups for one in group) / len(said))
        val = await art.gather_trajectories((rollout(model, task) for task in tasks["val"]), pbar_desc="val")
        await model.log(val, split="val")
        await model.delete_checkpoints()
    try:
        await model.train(groups, config=art.TrainConfig(), _config={"advantage_balance": 0.5})
    except httpx.HTTPStatusError as error:
        found["refused"] = str(error)
    found["torch"] = "torch" in sys.modules
    print(json.dumps(found))


asyncio.run(main())
