"""A policy learns in an OpenEnv environment, a server that others wrote (`pip install openenv` comes first).
Here it asks for French words, and rewards the right ones:

    python quiz_env/server.py 8000 & launch -- python openenv_env.py http://127.0.0.1:8000

Cost and duration: offline $0.00 and five minutes on 2 busy cores; rented about $2 and half an hour on one
H100 (estimated)."""

import sys
from concurrent.futures import ThreadPoolExecutor
from statistics import mean

from openai import OpenAI
from openenv.core import GenericEnvClient

from launcher.client import connect, group

run = connect()
client = OpenAI(base_url=run.base_url, api_key=run.api_key, timeout=run.patience.answer_seconds)
pool = ThreadPoolExecutor(64)


def episode(seed, model, purpose):
    with run.rollout(purpose=purpose) as rollout, GenericEnvClient(base_url=sys.argv[1]).sync() as env:
        result, messages, rollout.reward = env.reset(seed=seed, split=purpose), [], 0.0
        while not result.done:
            messages.append({"role": "user", "content": result.observation["prompt"]})
            answer = client.chat.completions.create(model=model, messages=messages, max_tokens=32)
            messages.append(answer.choices[0].message)
            result = env.step({"text": answer.choices[0].message.content or ""})
            rollout.reward += result.reward or 0.0
    return rollout


before = mean(float(it.reward or 0) for it in pool.map(episode, range(64), ["base"] * 64, ["eval"] * 64))
for step in range(run.read_state().get("step", 0), 20):
    seeds = [8 * step + place // 8 for place in range(64)]  # 8 episodes of one seed are a group
    played = list(pool.map(episode, seeds, [run.model] * 64, ["train"] * 64))
    groups = [group(f"seed {seeds[place]}", played[place : place + 8]) for place in range(0, 64, 8)]
    done = run.step(groups, client_state={"step": step + 1})
    print(f"step {step + 1}: mean reward {done.metrics['reward']:.2f}", flush=True)
after = mean(float(it.reward or 0) for it in pool.map(episode, range(64), [run.model] * 64, ["eval"] * 64))
print(f"held-out: {before:.2f} → {after:.2f}")
