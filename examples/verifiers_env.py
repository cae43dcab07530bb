"""An environment of Prime Intellect's verifiers, here `verifiers_french` beside this file, trains as it is:
`uv run --with verifiers==0.4.0 launch -- python examples/verifiers_env.py`

Cost and duration: offline $0.00 and three minutes on 2 busy cores; rented about $2 and half an hour on one
H100 (estimated)."""

import asyncio

import verifiers.v1 as vf

from launcher.client import connect, group

STEPS, TASKS, ROLLOUTS = 10, 8, 8
CONFIG = {"taskset": {"id": "verifiers_french"}, "agent": {"runtime": {"type": "subprocess"}}}
run, env = connect(), vf.load_environment(vf.resolve_env_config(CONFIG))
tasks = list(env.taskset.shuffle(seed=0))


async def play(task, model=run.model, url=run.session_url, temperature=1.0):
    client = vf.EvalClientConfig(base_url=url, api_key_var="LAUNCH_API_KEY")  # sends the trace's id
    sampling = vf.SamplingConfig(temperature=temperature, max_tokens=32)
    episode = await env.run_episode(task, vf.ModelContext(model, client, sampling))
    return episode.traces[0].id, episode.traces[0].reward if episode.ok else "the episode failed"


async def score(model):
    played = await asyncio.gather(*(play(task, model, run.base_url, 0.0) for task in tasks[50:]))
    return sum(reward for _, reward in played if not isinstance(reward, str)) / len(played)


async def main():
    async with env.serving():
        before = await score("base")
        for number in range(run.read_state().get("verifiers", 0), STEPS):
            batch = [tasks[(number * TASKS + place) % 50] for place in range(TASKS)]
            played = iter(await asyncio.gather(*(play(task) for task in batch for _ in range(ROLLOUTS))))
            groups = [group(task.key, dict(next(played) for _ in range(ROLLOUTS))) for task in batch]
            print(run.step(groups, client_state={"verifiers": number + 1}).metrics["reward"], flush=True)
        print(f"held-out: {before:.2f} → {await score(run.model):.2f} of {len(tasks[50:])} tasks")


asyncio.run(main())
