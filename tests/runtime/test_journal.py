"""The journal of what was sampled, as the threads that read it beside the event loop find it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from runtime.gateway.samples.samples import SampleStore
from tests.runtime.recorded import sampled
from tests.support.waiting import wait_until


class Watched:
    """A lock that says when somebody waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.awaited = threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.awaited.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_file_is_opened_once_whichever_threads_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was opened a second time was never closed."""
    store = SampleStore(tmp_path)
    sampled(store, "r")
    (ref,) = store.of_rollout("r")
    lock = store._journal._opening = Watched()
    opened: list[int] = []
    found: list[Any] = []
    real = os.open

    def read() -> None:
        found.append(store.load(ref))

    def slow(*arguments: Any) -> int:
        opened.append(real(*arguments))
        if len(opened) == 1:
            other.start()
            wait_until(lambda: lock.awaited.is_set() or len(opened) > 1, what="the other thread is here")
        return opened[-1]

    other = threading.Thread(target=read)
    monkeypatch.setattr(os, "open", slow)
    read()
    other.join()
    monkeypatch.undo()
    assert len(opened) == 1
    assert found[0] == found[1] and found[0][1].completion_ids == [3, 4, 5]
