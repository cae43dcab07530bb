"""A run that begins with an adapter: the queue takes it in once, and nothing is ready before it is served.

The trainer's side is played, as in test_steps.py; what it makes of the adapter is in test_start_trainer.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.shared.batch import read_batch
from runtime.shared.start_adapter_layout import START, StartAdapterError
from tests.runtime.steps_run import SOON_SECONDS, Run, Running, drive
from tests.support.waiting import wait_until_async


def give(folder: Path) -> None:
    """The adapter that a run in this folder begins with; the queue does not look into it."""
    (folder / START).mkdir()


def test_it_is_the_runs_first_step_and_nothing_is_ready_before_it_is_served(tmp_path: Path) -> None:
    give(tmp_path)

    async def work(run: Run) -> None:
        queue = run.queue()
        assert queue.starting
        async with Running(queue):
            await run.commit(1)
            done = await queue.wait(1, SOON_SECONDS)
        batch = read_batch(run.batch_folder(1))
        assert (batch.kind, batch.meta["from"]) == ("restore", START)
        assert (done.state, done.version, run.published, queue.starting) == ("published", 1, [1], False)
        again = run.queue()
        assert not again.starting and [step.id for step in again.list()] == [1]
        async with Running(again):
            assert (await again.submit(run.request("k", "a", "b"))).id == 2

    drive(work, tmp_path)


def test_a_gateway_that_died_before_it_was_served_serves_it(tmp_path: Path) -> None:
    give(tmp_path)

    async def work(run: Run) -> None:
        run.queue()
        run.refuse = "the engine is not there yet"
        queue = run.queue()
        async with Running(queue):
            await run.commit(1)
            assert "not there yet" in str((await queue.wait(1, SOON_SECONDS)).error)
            assert queue.starting and queue.start_failure is None, "the engine may still come"
        run.refuse = None
        later = run.queue()
        assert later.starting
        async with Running(later):
            await wait_until_async(lambda: not later.starting, SOON_SECONDS)
        assert run.published == [1]

    drive(work, tmp_path)


def test_an_adapter_that_the_trainer_cannot_take_ends_the_gateway_and_says_why(tmp_path: Path) -> None:
    give(tmp_path)

    async def work(run: Run) -> None:
        queue = run.queue()
        run.trainer_failure = "the adapter has rank 8"
        with pytest.raises(StartAdapterError, match="rank 8"):
            await queue.run()
        assert "rank 8" in str(run.queue().start_failure), "the next process of the gateway knows as well"

    drive(work, tmp_path)


def test_a_run_that_has_gone_on_begins_with_nothing(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        async with Running(run.queue()) as queue:
            await queue.submit(run.request("k", "a", "b"))
            await run.commit(1)
            await queue.wait(1, SOON_SECONDS)
        give(tmp_path)
        assert not run.queue().starting and len(run.queue().list()) == 1

    drive(work, tmp_path)
