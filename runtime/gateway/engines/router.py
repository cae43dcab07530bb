"""Routes a request to the engine that has its prefix cached, or to the least busy one.

vLLM caches the prefixes of its requests. So the turns of one rollout go to one engine, its home, and the
rollouts of one group begin at one engine, where the first of them has cached their prompt. A home is a
preference among the engines that are ready at this moment; no request waits for it. The home is passed over
if it is not ready, or has more requests in flight than the least busy engine by more than a margin. The
engine chosen instead is the new home. A rollout that begins gains only its group's prompt, so its engine may
have at most an even share of all requests in flight and a quarter more: in a small step no engine is idle
while others answer several groups.

A request may name its rollout; none names its group. The rollouts of one group begin with the same prompt,
so the whole prompt stands for the group. The prompt's first characters, by which routers for vLLM decide,
would not do: in a DSPy program every prompt begins with the same instructions and examples, so all groups of
a step would go to one engine. A request without a rollout goes where its conversation's earlier prompt went.
A home holds for one policy version only: vLLM caches each adapter's prefixes apart.

Neighbours: engine_pool.py asks, with the engines that are ready; completions/routing_key.py makes the
digests of a request's prompts; prefix_affinity.py stores the homes. Knows prompts by their digests alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from runtime.gateway.engines.engine import Engine
from runtime.gateway.engines.prefix_affinity import AffinityTable

# The number of requests that a preferred engine may have in flight beyond the least busy one: a group of the
# usual size, and a quarter of the least busy one's, because with many in flight chance alone makes that much.
MARGIN = 8
MARGIN_SHARE = 4
# Homes of rollouts, and as many of prompts: several times the number of rollouts that can be in flight.
MAX_AFFINITIES = 1 << 14
# A rollout that sends nothing for so long has ended, or has lost its place in the engine's cache.
AFFINITY_SECONDS = 1800.0


@dataclass(frozen=True)
class RoutingKey:
    """The facts of a request by which it is routed: its rollout's id, None if it names none; and
    `prompt_prefixes`, which returns the digest of its prompt, then that of its conversation's earlier prompt,
    if it has one. It is called only if the rollout has no engine yet."""

    rollout: str | None
    prompt_prefixes: Callable[[], tuple[bytes, ...]]


def max_in_flight(least: int) -> int:
    """How many requests a preferred engine may have in flight when the least busy one has `least`."""
    return least + MARGIN + least // MARGIN_SHARE


def max_in_flight_for_prompt(in_flight: Sequence[int]) -> int:
    """How many requests an engine may have in flight, with the new one, to be chosen for its cached prompt.
    `in_flight`: the requests of each ready engine."""
    share = -(-(sum(in_flight) + 1) // len(in_flight))
    return share + share // MARGIN_SHARE


class Router:
    """Chooses an engine for each request, and remembers its choices. Not thread-safe: only the gateway's
    event loop uses it."""

    def __init__(self, most: int = MAX_AFFINITIES, clock: Callable[[], float] = time.monotonic) -> None:
        """`most`: the homes kept of rollouts, and as many of prompts; with 0 the least busy engine is always
        chosen."""
        self._rollouts: AffinityTable[str] = AffinityTable(most, AFFINITY_SECONDS, clock)
        self._prompts: AffinityTable[bytes] = AffinityTable(most, AFFINITY_SECONDS, clock)
        # The number of the last request that each engine was given for being the least busy.
        self._given: dict[Engine, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._rollouts) + len(self._prompts)

    def choose(self, ready: Sequence[Engine], version: int, key: RoutingKey) -> Engine:
        """One of `ready`, which is not empty; it is now the home of the request's rollout or prompt."""
        most = max_in_flight(min(engine.in_flight for engine in ready))
        fitting = [engine for engine in ready if engine.in_flight <= most]
        chosen = None if key.rollout is None else self._rollouts.get(key.rollout, version)
        if chosen is None or chosen not in fitting:
            chosen = self._by_prompt(ready, fitting, version, key.prompt_prefixes())
        if key.rollout is not None:
            self._rollouts.put(key.rollout, version, chosen)
        return chosen

    def forget(self, rollouts: Iterable[str]) -> None:
        """Forget the homes of rollouts that have ended."""
        for rollout in rollouts:
            self._rollouts.forget(rollout)

    def forget_engine(self, engine: Engine) -> None:
        """Forget an engine's homes: it was restarted, and its prefix cache is empty."""
        self._rollouts.forget_engine(engine)
        self._prompts.forget_engine(engine)

    def _by_prompt(
        self, ready: Sequence[Engine], fitting: Sequence[Engine], version: int, prompts: Sequence[bytes]
    ) -> Engine:
        """The first of these prompts' homes that is not too busy, else the least busy engine. It is now the
        home of the first prompt."""
        most = max_in_flight_for_prompt([engine.in_flight for engine in ready])
        preferred = (self._prompts.get(prompt, version) for prompt in prompts)
        chosen = next((it for it in preferred if it and it in fitting and it.in_flight < most), None)
        chosen = chosen or self._least_busy(ready)
        for prompt in prompts[:1]:
            self._prompts.put(prompt, version, chosen)
        return chosen

    def _least_busy(self, ready: Sequence[Engine]) -> Engine:
        """The least busy engine; of several, the one whose turn it is, so that rollouts that come one by one
        spread."""
        chosen = min(ready, key=lambda engine: (engine.in_flight, self._given.get(engine, 0)))
        self._count += 1
        self._given[chosen] = self._count
        return chosen
