"""With two real engines, by vLLM's own counters: an agent's turns find their prefix cached.

The same agents ask with homes remembered and without, each time by prompts that no engine has seen.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runtime.gateway.engines.router import Router
from runtime.gateway.gateway import Components
from tests.runtime.conftest import TINY_MODEL
from tests.runtime.engines import Engine
from tests.runtime.gateway_here import ask, gateway_here

pytestmark = pytest.mark.slow

GROUPS, MEMBERS, TURNS = 4, 3, 5
# Longer than a block of the cache: what is not a whole block is in none.
TURN = "go on: there is a red house, a black cat, an old man, a small boat and the sea behind it all; " * 3
_COUNTED = re.compile(r"^vllm:prefix_cache_(hits|queries)_total\{.*\} (\S+)$", re.MULTILINE)
_BLOCK = re.compile(r'^vllm:cache_config_info\{.*\bblock_size="(\d+)"', re.MULTILINE)


@dataclass(frozen=True)
class Counted:
    """Tokens of prompts that engines were asked for, and those of them that were in a cache."""

    queries: float = 0
    hits: float = 0

    def __add__(self, other: Counted) -> Counted:
        return Counted(self.queries + other.queries, self.hits + other.hits)

    def since(self, before: Counted) -> Counted:
        return Counted(self.queries - before.queries, self.hits - before.hits)

    @property
    def share(self) -> float:
        return self.hits / self.queries


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two engines of the tiny model, where a gateway looks for them."""
    folder = tmp_path_factory.mktemp("warm")
    warm = Engine(folder, folder / "armed")
    with ExitStack() as stack:
        stack.callback(warm.close)
        found = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slip-")))
        for place in range(2):
            own = tmp_path_factory.mktemp("engine")
            socket = stack.enter_context(warm.serving(own, model_path=str(TINY_MODEL)))
            (found / f"engine-{place}.sock").symlink_to(socket)
        yield found


async def metrics(parts: Components) -> list[str]:
    """What each engine says of itself."""
    said = []
    for client in parts.clients:
        async with client._open().get("http://engine/metrics") as response:
            said.append(await response.text())
    return said


async def counted(parts: Components) -> Counted:
    """By all engines together, since they were started."""
    total = Counted()
    for said in map(dict, map(_COUNTED.findall, await metrics(parts))):
        total += Counted(float(said["queries"]), float(said["hits"]))
    return total


async def block_tokens(parts: Components) -> int:
    """How many tokens are cached together."""
    (found,) = {int(_BLOCK.findall(said)[0]) for said in await metrics(parts)}
    return found


class Agent:
    """One rollout, turn by turn; `prompts`: the tokens of each of its questions."""

    def __init__(self, name: str, prompt: str) -> None:
        self._name = name
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
        self.prompts: list[int] = []

    async def ask(self, parts: Components) -> None:
        status, said = await ask(parts, self._name, self._messages, max_tokens=12)
        assert status == 200, said
        self.prompts.append(said["usage"]["prompt_tokens"])
        self._messages += [said["choices"][0]["message"], {"role": "user", "content": TURN}]


async def played(parts: Components, name: str, placement: Router) -> tuple[Counted, list[list[int]]]:
    """What engines count while agents ask, and the tokens of each one's questions.

    One asks at a time, in any order: so nothing but the placement decides where.
    """
    parts.pool.router = placement
    before = await counted(parts)
    agents = [Agent(f"{name}-{at}", f"{name}, {at // MEMBERS}: {TURN}") for at in range(GROUPS * MEMBERS)]
    for agent in random.Random(0).sample(agents, TURNS * len(agents), counts=[TURNS] * len(agents)):
        await agent.ask(parts)
    return (await counted(parts)).since(before), [agent.prompts for agent in agents]


def test_turns_find_their_prefix_cached_because_homes_are_remembered(sockets: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_here(tmp_path, sockets, engines=2, model=str(TINY_MODEL)) as parts:
            await asyncio.gather(*(client.health() for client in parts.clients))
            sticky, asked = await played(parts, "sticky", Router())
            alone, _ = await played(parts, "without", Router(most=0))
            block = await block_tokens(parts)
        # Of each later turn, at least the whole blocks of the question before it.
        cached = sum(tokens // block * block for one in asked for tokens in one[:-1])
        print(json.dumps({"homes": sticky.share, "without": alone.share, "least": cached / sticky.queries}))
        assert sticky.queries == sum(map(sum, asked))
        assert sticky.hits >= cached
        assert alone.share < sticky.share - 0.1

    asyncio.run(scenario())
