"""Which engine a request goes to: a rollout's turns to one, a group's rollouts to one, and none to excess.

The choice alone, then with the real pool and the real hot path before engines that are played.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from runtime.gateway.completions.routing_key import routing_key_of
from runtime.gateway.engines.engine import Engine
from runtime.gateway.engines.engine_client import EngineClient
from runtime.gateway.engines.engine_pool import EnginePool
from runtime.gateway.engines.router import (
    AFFINITY_SECONDS,
    MARGIN,
    Router,
    RoutingKey,
    max_in_flight,
    max_in_flight_for_prompt,
)
from runtime.gateway.gateway import Components
from runtime.shared.process_status import SupervisorStatus
from runtime.shared.schema import Group, Member, StepRequest
from tests.runtime.gateway_here import ask, gateway_here
from tests.runtime.recorded import answer, asked, choice, record
from tests.support.upstream import Upstream

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "answer as an oracle does"}
ANSWER = {"role": "assistant", "content": "x"}


def engines(count: int) -> list[Engine]:
    """That many, all ready; nobody is asked."""
    return [Engine(f"engine-{place}", EngineClient(Path(f"e{place}.sock")), True) for place in range(count)]


def of(rollout: str | None, *messages: str) -> RoutingKey:
    """A request of this rollout; answers stand between its messages."""
    said: list[dict[str, Any]] = [SYSTEM]
    for message in messages:
        said += [{"role": "user", "content": message}, ANSWER]
    return routing_key_of(asked(None, rollout, messages=said[:-1]))


# ------------------------------------------------------------------ the choice


def in_any_order(count: int, seed: int) -> list[int]:
    """So many numbers, in an order by which engines that take turns would not meet the same ones again."""
    return random.Random(seed).sample(range(count), count)


def test_the_turns_of_a_rollout_go_to_the_engine_of_its_first_whatever_it_made_of_them() -> None:
    placement, ready = Router(), engines(3)
    homes: dict[int, Engine] = {}
    for turn in range(1, 6):
        for number in in_any_order(12, turn):
            # It has told its own earlier turns in other words.
            said = [f"{number} {place}, by turn {turn}" for place in range(turn)]
            chosen = placement.choose(ready, 0, of(f"r{number}", *said))
            assert homes.setdefault(number, chosen) is chosen
    assert sorted(Counter(home.name for home in homes.values()).values()) == [4, 4, 4]


def test_what_has_no_rollout_goes_where_the_question_before_it_went() -> None:
    placement, ready = Router(), engines(3)
    homes: dict[int, Engine] = {}
    for turn in range(1, 5):
        for number in in_any_order(9, turn):
            said = [f"{number} {place}" for place in range(turn)]
            chosen = placement.choose(ready, 0, of(None, *said))
            assert homes.setdefault(number, chosen) is chosen
    assert sorted(Counter(home.name for home in homes.values()).values()) == [3, 3, 3]


def test_the_rollouts_of_a_group_begin_at_one_engine_and_groups_at_several() -> None:
    placement, ready = Router(), engines(3)
    homes: dict[int, set[str]] = {}
    for number in in_any_order(36, 0):
        group = number % 9
        chosen = placement.choose(ready, 0, of(f"r{number}", f"example {group}"))
        homes.setdefault(group, set()).add(chosen.name)
    assert all(len(names) == 1 for names in homes.values()), homes
    assert sorted(Counter(name for names in homes.values() for name in names).values()) == [3, 3, 3]


@pytest.mark.parametrize("seed", range(5))
def test_no_engine_is_preferred_that_has_a_margin_more_to_do_than_the_least_busy(seed: int) -> None:
    chance, placement, ready = random.Random(seed), Router(), engines(4)
    in_flight: list[Engine] = []
    for number in range(3000):
        # Few groups, the first of them by far the largest, whose rollouts come in a heap.
        group = min(chance.randrange(8), chance.randrange(8), chance.randrange(8))
        origin = of(f"r{group}-{chance.randrange(40)}", f"example {group}")
        least = min(engine.in_flight for engine in ready)
        chosen = placement.choose(ready, 0, origin)
        assert chosen.in_flight <= max_in_flight(least)
        chosen.in_flight += 1
        in_flight.append(chosen)
        while len(in_flight) > (400 if number < 1500 else 20):
            in_flight.pop(chance.randrange(len(in_flight))).in_flight -= 1


def test_one_question_that_all_ask_at_once_is_answered_by_all() -> None:
    placement, ready = Router(), engines(4)
    for number in range(400):
        placement.choose(ready, 0, of(f"r{number}", "the one example")).in_flight += 1
    counts = [engine.in_flight for engine in ready]
    assert max(counts) <= max_in_flight_for_prompt(counts), counts
    assert min(counts) >= 0.9 * 400 / 4, counts


@pytest.mark.parametrize("count", [2, 3, 6])
def test_no_engine_is_idle_in_a_step_that_is_small(count: int) -> None:
    placement, ready = Router(), engines(count)
    for group in range(4):
        for member in range(8):
            placement.choose(ready, 0, of(f"r{group}-{member}", f"example {group}")).in_flight += 1
    counts = [engine.in_flight for engine in ready]
    assert max(counts) <= max_in_flight_for_prompt(counts) <= 32 / count * 1.25 + 1, counts
    assert min(counts) >= 0.6 * 32 / count, counts


def test_with_many_in_flight_a_group_still_begins_at_one_engine() -> None:
    placement, ready = Router(), engines(4)
    for engine in ready:
        engine.in_flight = 64
    for group in range(4):
        homes = [
            placement.choose(ready, 0, of(f"r{group}-{number}", f"example {group}")) for number in range(8)
        ]
        assert len(set(homes)) == 1
        for home in homes:
            home.in_flight += 1


def test_who_passes_a_busy_home_over_is_at_home_where_it_went() -> None:
    placement, ready = Router(), engines(2)
    home = placement.choose(ready, 0, of("r", "a"))
    (other,) = (engine for engine in ready if engine is not home)
    home.in_flight = MARGIN
    assert placement.choose(ready, 0, of("r", "a", "b")) is home
    home.in_flight = MARGIN + 1
    assert placement.choose(ready, 0, of("r", "a", "b", "c")) is other
    home.in_flight = 0
    assert placement.choose(ready, 0, of("r", "a", "b", "c", "d")) is other


def test_what_another_version_has_cached_is_no_reason_to_go_there() -> None:
    placement, ready = Router(), engines(2)
    home = placement.choose(ready, 1, of("r", "a"))
    home.in_flight = 1
    assert placement.choose(ready, 1, of("r", "a", "b")) is home
    assert placement.choose(ready, 2, of("r", "a", "b", "c")) is not home


# ------------------------------------------------------------------ what is remembered


def test_however_many_rollouts_come_the_newest_are_remembered_and_no_more() -> None:
    placement, ready = Router(most=50), engines(2)
    home = placement.choose(ready, 0, of("r", "a"))
    for number in range(1000):
        placement.choose(ready, 0, of(f"r{number}", f"example {number}"))
        assert placement.choose(ready, 0, of("r", "a", "b")) is home
        assert len(placement) <= 100
    home.in_flight = 1
    assert placement.choose(ready, 0, of("r0", "another")) is not home, "it is as new"


def test_a_rollout_that_is_quiet_for_long_is_forgotten() -> None:
    now = [0.0]
    placement, ready = Router(clock=lambda: now[0]), engines(2)
    for number in range(100):
        placement.choose(ready, 0, of(f"r{number}", f"example {number}"))
    assert len(placement) == 200
    now[0] = AFFINITY_SECONDS + 1
    placement.choose(ready, 0, of("r", "a"))
    assert len(placement) == 2


def test_the_rollouts_of_a_step_are_forgotten_when_it_is_taken_in(tmp_path: Path) -> None:
    async def scenario(parts: Components, _: Played) -> list[int]:
        placement = parts.pool.router
        for number in range(4):
            rollout = f"r{number}"
            record(parts.samples, asked(f"q{number}", rollout), answer([1, 2], choice([5], [-1.0])))
            placement.choose(parts.pool.engines, 0, of(rollout, rollout))
        sizes = [len(placement)]
        members = [Member(rollout=f"r{number}", reward=float(number)) for number in range(3)]
        await parts.steps.submit(StepRequest(key="k", groups=[Group(id="g", members=members)]))
        return [*sizes, len(placement)]

    assert played(tmp_path, scenario) == [8, 5], "three rollouts are over, questions are not"


# ------------------------------------------------------------------ engines that are away


async def well(_: web.Request) -> web.StreamResponse:
    return web.json_response({"results": [{"logprobs_mode": "processed_logprobs"}]})


class Played:
    """Two engines, each of which answers `says[place]`; `seen`: which of them was asked, in order."""

    def __init__(self, sockets: Path) -> None:
        self.says: list[int] = [200, 200]
        self.seen: list[int] = []
        self.engines = [
            Upstream(sockets / f"engine-{place}.sock", {CHAT: self._chat(place), "/collective_rpc": well})
            for place in range(2)
        ]
        for engine in self.engines:
            engine.start()

    def _chat(self, place: int) -> Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]]:
        async def chat(request: web.Request) -> web.StreamResponse:
            await request.read()
            self.seen.append(place)
            if self.says[place] == 200:
                return web.Response(body=answer([1, 2], choice([5], [-1.0])))
            return web.json_response({"error": {"message": "not me"}}, status=self.says[place])

        return chat


async def chat(parts: Components, rollout: str, *said: str) -> int:
    """The status of a turn of a rollout, by the door."""
    return (await ask(parts, rollout, [{"role": "user", "content": text} for text in said]))[0]


def played(state: Path, scenario: Callable[[Components, Played], Coroutine[Any, Any, Any]]) -> Any:
    """What a scenario comes to with a gateway in this process, in front of engines that are played."""

    async def play(sockets: Path, engines: Played) -> Any:
        async with gateway_here(state, sockets, engines=2) as parts:
            return await scenario(parts, engines)

    with tempfile.TemporaryDirectory(prefix="slip-") as sockets:
        engines = Played(Path(sockets))
        try:
            return asyncio.run(play(Path(sockets), engines))
        finally:
            for engine in engines.engines:
                engine.close()


def test_an_agents_turns_reach_one_engine_and_another_agents_the_other(tmp_path: Path) -> None:
    async def scenario(parts: Components, engines: Played) -> list[int]:
        for turn in range(1, 4):
            for rollout in ("a", "b"):
                assert await chat(parts, rollout, *[f"{rollout}{number}" for number in range(turn)]) == 200
        return engines.seen

    assert played(tmp_path, scenario) == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("status", [404, 500], ids=["behind in version", "failing"])
def test_a_home_that_does_not_answer_is_passed_over_in_the_same_request(tmp_path: Path, status: int) -> None:
    async def scenario(parts: Components, engines: Played) -> list[int]:
        assert await chat(parts, "a", "a0") == 200
        engines.says[0] = status
        assert await chat(parts, "a", "a0", "a1") == 200
        engines.says[0] = 200
        parts.pool.engines[0].ready = True
        assert await chat(parts, "a", "a0", "a1", "a2") == 200
        return engines.seen

    assert played(tmp_path, scenario) == [0, 0, 1, 1]


def test_a_home_whose_connection_is_lost_is_passed_over_in_the_same_request(tmp_path: Path) -> None:
    async def scenario(parts: Components, engines: Played) -> list[int]:
        assert await chat(parts, "a", "a0") == 200
        await asyncio.to_thread(engines.engines[0].stop)
        assert await chat(parts, "a", "a0", "a1") == 200
        return engines.seen

    assert played(tmp_path, scenario) == [0, 1]


def test_a_home_that_is_away_or_starts_anew_is_not_waited_for(tmp_path: Path) -> None:
    staged = asyncio.Event()

    async def restage(_: EngineClient) -> None:
        await staged.wait()

    async def has(_: int, __: list[EngineClient]) -> bool:
        return False

    async def scenario() -> None:
        pool = EnginePool(
            [EngineClient(tmp_path / f"{place}") for place in range(2)], supervisor_status, restage, has
        )
        first, second = pool.engines
        first.ready = second.ready = True
        assert await pool.pick(0, of("r", "a")) is first
        pool.mark_unreachable(first)
        coming = asyncio.create_task(pool._bring_back(first, 2))
        await asyncio.sleep(0)
        assert await pool.pick(0, of("r", "a", "b")) is second, "the first is being given its versions"
        pool.router.choose([first], 0, of("kept", "k"))
        staged.set()
        await coming
        assert first.ready and len(pool.router) == 2, "what it had cached went with the process before it"
        assert await pool.pick(0, of("r", "a", "b", "c")) is second

    supervisor_status = SupervisorStatus(tmp_path, 60)
    asyncio.run(scenario())
