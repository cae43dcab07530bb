"""An environment of Prime Intellect's verifiers trains as it is: its tasks, its harness and its rewards.

    uv run --with verifiers==0.4.0 launch -- python examples/verifiers_env.py

`verifiers_french` is the file beside this one. Any other that is installed is named by its id.
"""

import asyncio
import random
from statistics import mean

import verifiers.v1 as vf

from launcher.client import connect, group

STEPS, TASKS, ROLLOUTS = 10, 8, 8
ENVIRONMENT = {"taskset": {"id": "verifiers_french"}, "agent": {"runtime": {"type": "subprocess"}}}
run = connect()  # the run that `launch` started
env = vf.load_environment(vf.resolve_env_config(ENVIRONMENT))
tasks = list(env.taskset.shuffle(seed=0))
train, held_out = tasks[:50], tasks[50:]


async def play(task, model, base_url, temperature=1.0):
    """An episode with the model at this address: its reward, or why it has none."""
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="LAUNCH_API_KEY")
    sampling = vf.SamplingConfig(temperature=temperature, max_tokens=32)
    episode = await env.run_episode(task, vf.ModelContext(model, client, sampling))
    return episode.traces[0].reward if episode.ok else "the episode failed"


async def roll_out(task):
    """A group. Each rollout has an address of its own, which tags what is sampled there."""
    names = [run.new_rollout() for _ in range(ROLLOUTS)]
    rewards = await asyncio.gather(*(play(task, run.model, run.rollout_url(name)) for name in names))
    return group(task.key, dict(zip(names, rewards, strict=True)))


async def score(model):
    async with env.serving():
        rewards = await asyncio.gather(*(play(task, model, run.base_url, 0.0) for task in held_out))
    return mean(map(float, rewards))


async def main():
    before = await score("base")
    for number in range(run.read_state().get("verifiers", 0), STEPS):
        async with env.serving():  # for one step: it keeps a connection to each address
            groups = await asyncio.gather(*map(roll_out, random.Random(number).sample(train, TASKS)))
        done = run.step(groups, client_state={"verifiers": number + 1})
        print(f"step {number + 1}/{STEPS}: reward {done.metrics['reward']:.2f}", flush=True)
    print(f"held-out: {before:.2f} → {await score(run.model):.2f} of {len(held_out)} tasks")


asyncio.run(main())
