"""How many turns meet their engine again, and how even the engines' load stays, in simulated time.

    PYTHONPATH=. python -m tests.bench.placement [--tool-seconds 6]     (the runtime's environment, 2 s)

Agents of 8 turns, in groups of 8, are placed by the gateway's own `Router` on engines that are played: an
answer takes 3 s on average and a tool as long as said, by chance. As many agents are always under way, until
three times as many have ended. Prints one JSON object: for each number of engines and agents, with `homes`
remembered and `without`,
- `moved`: the share of later turns that went to another engine than the turn before;
- `group`: engines that the rollouts of one group began at, on average;
- `apart`: requests in flight at the apart engine more than at the least busy one, median and p99;
- `choice_us`: what a choice takes.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from runtime.gateway.engines.engine import Engine
from runtime.gateway.engines.engine_client import EngineClient
from runtime.gateway.engines.router import MAX_AFFINITIES, Router, RoutingKey

TURNS = GROUP = 8
ANSWER_SECONDS = 3.0
CASES = ((3, 64), (3, 768), (6, 1536))


def origin(agent: int, turn: int) -> RoutingKey:
    """As a request of this turn says it."""
    first = f"example {agent // GROUP}".encode()
    asked = [f"{agent} {number}".encode() if number else first for number in range(turn + 1)]
    return RoutingKey(f"r{agent}", lambda: tuple(reversed(asked[-2:])))


class Play:
    """Simulated time, in which agents ask and engines answer."""

    def __init__(self, engines: int, agents: int, most: int, tool_seconds: float) -> None:
        self._chance = random.Random(0)
        self._placement = Router(most)
        self._engines = [Engine(f"{it}", EngineClient(Path(f"{it}")), True) for it in range(engines)]
        self._agents, self._tool_seconds = agents, tool_seconds
        self._at: dict[int, Engine] = {}
        self._due: list[tuple[float, int, int, int, bool]] = []
        self._order = itertools.count()
        self._began: dict[int, set[str]] = defaultdict(set)
        self._moved: list[bool] = []
        self._apart: list[int] = []
        self._chosen_seconds: list[float] = []

    def run(self) -> dict[str, Any]:
        coming = iter(range(self._agents, 3 * self._agents))
        for agent in range(self._agents):
            self._put(self._chance.random(), agent, 0, answered=False)
        while self._due:
            now, _, agent, turn, answered = heapq.heappop(self._due)
            if not answered:
                self._ask(agent, turn)
                self._put(now + self._taking(ANSWER_SECONDS), agent, turn, answered=True)
                continue
            self._at[agent].in_flight -= 1
            if turn + 1 < TURNS:
                self._put(now + self._taking(self._tool_seconds), agent, turn + 1, answered=False)
            elif (another := next(coming, None)) is not None:
                self._put(now, another, 0, answered=False)
        apart = sorted(self._apart)
        return {
            "moved": round(statistics.mean(self._moved), 3),
            "group": round(statistics.mean(len(names) for names in self._began.values()), 2),
            "apart": [apart[len(apart) * percent // 100] for percent in (50, 99)],
            "choice_us": round(1e6 * statistics.median(self._chosen_seconds), 1),
        }

    def _ask(self, agent: int, turn: int) -> None:
        begun = time.perf_counter()
        chosen = self._placement.choose(self._engines, 0, origin(agent, turn))
        self._chosen_seconds.append(time.perf_counter() - begun)
        if turn:
            self._moved.append(self._at[agent] is not chosen)
        else:
            self._began[agent // GROUP].add(chosen.name)
        self._at[agent] = chosen
        chosen.in_flight += 1
        busy = [engine.in_flight for engine in self._engines]
        self._apart.append(max(busy) - min(busy))

    def _taking(self, seconds: float) -> float:
        return self._chance.expovariate(1 / seconds)

    def _put(self, when: float, agent: int, turn: int, *, answered: bool) -> None:
        heapq.heappush(self._due, (when, next(self._order), agent, turn, answered))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tool-seconds", type=float, default=6.0)
    options = parser.parse_args()
    cases = [
        {
            "engines": engines,
            "agents": agents,
            "homes": Play(engines, agents, MAX_AFFINITIES, options.tool_seconds).run(),
            "without": Play(engines, agents, 0, options.tool_seconds).run(),
        }
        for engines, agents in CASES
    ]
    print(json.dumps({"bench": "placement", "tool_seconds": options.tool_seconds, "cases": cases}))


if __name__ == "__main__":
    main()
