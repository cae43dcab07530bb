"""With two real engines, by vLLM's own counters: an agent's turns find their prefix cached.

The same agents ask with homes remembered and without, each time by prompts that no engine has seen.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runtime.gateway.engines.placement import Placement
from runtime.gateway.gateway import Parts
from tests.runtime.conftest import TINY_MODEL
from tests.runtime.engines import Engine
from tests.runtime.gateway_here import ask, gateway_here

pytestmark = pytest.mark.slow

GROUPS, MEMBERS, TURNS = 4, 4, 5
TURN = "go on: there is a red house, a black cat, an old man, a small boat and the sea behind it all"
_COUNTED = re.compile(r"^vllm:prefix_cache_(hits|queries)_total\{.*\} (\S+)$", re.MULTILINE)


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


async def counted(parts: Parts) -> Counted:
    """By all engines together, since they were started."""
    total = Counted()
    for client in parts.clients:
        async with client._open().get("http://engine/metrics") as response:
            said = dict(_COUNTED.findall(await response.text()))
        total += Counted(float(said["queries"]), float(said["hits"]))
    return total


async def agent(parts: Parts, rollout: str, prompt: str, prompts: list[int]) -> None:
    """All turns of one rollout, one after the other; `prompts` gets the tokens of each question."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    for _ in range(TURNS):
        status, said = await ask(parts, rollout, messages, max_tokens=12)
        assert status == 200, said
        prompts.append(said["usage"]["prompt_tokens"])
        messages += [said["choices"][0]["message"], {"role": "user", "content": TURN}]


async def played(parts: Parts, name: str, placement: Placement) -> tuple[Counted, list[list[int]]]:
    """What engines count while agents ask, all at once; and each one's questions."""
    parts.fleet.placement = placement
    before = await counted(parts)
    asked: list[list[int]] = [[] for _ in range(GROUPS * MEMBERS)]
    await asyncio.gather(
        *(
            agent(parts, f"{name}-{place}", f"{name}, {place // MEMBERS}: {TURN}", asked[place])
            for place in range(GROUPS * MEMBERS)
        )
    )
    return (await counted(parts)).since(before), asked


def test_turns_find_their_prefix_cached_where_homes_are_remembered_and_half_of_them_elsewhere(
    sockets: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with gateway_here(tmp_path, sockets, engines=2, model=str(TINY_MODEL)) as parts:
            await asyncio.gather(*(client.health() for client in parts.clients))
            sticky, asked = await played(parts, "sticky", Placement())
            alone, _ = await played(parts, "without", Placement(most=0))
        before = sum(sum(one[:-1]) for one in asked)
        print(
            json.dumps({"sticky": sticky.share, "without": alone.share, "earlier": before / sticky.queries})
        )
        assert sticky.queries == sum(map(sum, asked))
        assert sticky.hits >= 0.9 * before
        assert alone.share < sticky.share - 0.1

    asyncio.run(scenario())
