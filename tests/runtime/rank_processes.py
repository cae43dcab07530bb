"""Real processes that join over gloo as torchrun's would: by the environment."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable

from runtime.trainer.ranks import Ranks
from tests.runtime.trainer_fixtures import tiny_model
from tests.support.ports import free_port

_LIFE_SECONDS = 600


def run_ranks(size: int, work: Callable[[Ranks], None], seconds: float = _LIFE_SECONDS) -> None:
    """Do `work` in `size` processes at once; each must end well, and within this bound."""
    tiny_model()
    port = free_port()
    context = multiprocessing.get_context("fork")  # torch is imported already, with one thread
    children = [context.Process(target=_one, args=(rank, size, port, work)) for rank in range(size)]
    for child in children:
        child.start()
    until = time.monotonic() + seconds
    for child in children:
        child.join(max(0.0, until - time.monotonic()))
    alive = [child for child in children if child.is_alive()]
    for child in alive:
        child.kill()
    assert not alive and [child.exitcode for child in children] == [0] * size


def _one(rank: int, size: int, port: int, work: Callable[[Ranks], None]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = Ranks.join("cpu")
    assert (ranks.rank, ranks.size, ranks.is_rank_zero) == (rank, size, rank == 0)
    assert ranks.broadcast(7 + rank) == 7
    work(ranks)
    ranks.leave()
