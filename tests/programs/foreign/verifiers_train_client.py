"""verifiers' own train client in rollouts of a run: it tokenises here, and samples by /inference/v1/generate.

    python verifiers_train_client.py TOKENIZER

Each rollout has two turns. Prints one JSON object: for each rollout's name the ids and logprobs that
verifiers got for its turns, and what a step trained of them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from renderers import DefaultRendererConfig

from launcher.client import connect, group

__all__ = ["Phrases", "TwoTurns"]
ROLLOUTS = 4
LIMIT = 40


class Phrase(vf.Task[vf.TaskData]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        return float(sum(len(turn.content or "") for turn in trace.assistant_messages))


class Phrases(vf.Taskset[Phrase]):
    def load(self) -> list[Phrase]:
        return [Phrase(vf.TaskData(prompt="the black cat", system_prompt="Be brief."))]


class TwoTurns(vf.Harness[vf.HarnessConfig]):
    """An agent in this process, which asks again with what it was answered."""

    NEEDS_CONTAINER = EXECUTES_CODE = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        messages: list[Any] = [
            {"role": "system", "content": data.system_prompt},
            {"role": "user", "content": data.prompt},
        ]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
                messages.append({"role": "user", "content": "again"})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def turns_of(trace: vf.Trace) -> list[dict[str, list[Any]]]:
    """The ids of each turn's prompt and answer, and the answer's logprobs."""
    found = []
    for node in trace.nodes:
        if node.sampled:
            sampled = sum(node.mask)
            before = [] if node.parent is None else path_to(trace, node.parent)
            prompt = before + node.token_ids[: len(node.token_ids) - sampled]
            completion = node.token_ids[len(node.token_ids) - sampled :]
            found.append({"prompt": prompt, "completion": completion, "logprobs": node.logprobs})
    return found


def path_to(trace: vf.Trace, number: int) -> list[int]:
    node = trace.nodes[number]
    return ([] if node.parent is None else path_to(trace, node.parent)) + node.token_ids


async def main(tokenizer: str) -> None:
    run = connect()
    config = {"taskset": {"id": "verifiers_train_client"}, "agent": {"runtime": {"type": "subprocess"}}}
    env = vf.load_environment(vf.resolve_env_config(config))
    (task,) = env.taskset

    client = vf.TrainClientConfig(
        base_url=run.session_url,
        api_key_var="LAUNCH_API_KEY",
        renderer=DefaultRendererConfig(),
        renderer_model_name=tokenizer,
    )
    sampling = vf.SamplingConfig(temperature=1.0, max_tokens=LIMIT)

    async def roll_out() -> vf.Trace:
        episode = await env.run_episode(task, vf.ModelContext(run.model, client, sampling))
        (trace,) = episode.traces
        assert episode.ok, trace.errors
        return trace

    async with env.serving():
        traces = await asyncio.gather(*(roll_out() for _ in range(ROLLOUTS)))
    rewards = {trace.id: trace.reward + number for number, trace in enumerate(traces)}
    said = {
        "rollouts": list(rewards),
        "turns": {trace.id: turns_of(trace) for trace in traces},
        "counts": run.step([group("phrase", rewards)]).counts.model_dump(),
    }
    print(json.dumps(said))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
