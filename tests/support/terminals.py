"""A person's end of a terminal: what is typed there, and all that it shows.

Neighbours: `typed.py` types where nothing is a terminal.
"""

from __future__ import annotations

import os
import select
import threading

from tests.support.waiting import wait_until


class Terminal:
    """`screen` is the master's descriptor, ours from here on; `text` is all that it has shown."""

    def __init__(self, screen: int) -> None:
        self.screen = screen
        self.text = ""
        self._closing = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def type(self, keys: str) -> None:
        os.write(self.screen, keys.encode())

    def shows(self, text: str, times: int = 1, *, since: int = 0, seconds: float = 180.0) -> None:
        """Until it has shown it so often, `since` a length of its text."""

        def shown() -> bool:
            return self.text.count(text, since) >= times

        wait_until(shown, seconds, lambda: f"{text} in:\n{self.text}")

    def close(self) -> None:
        """Hang up."""
        self._closing = True
        self._reader.join()
        os.close(self.screen)

    def _read(self) -> None:
        while not self._closing:
            try:
                if not select.select([self.screen], [], [], 0.05)[0]:
                    continue
                piece = os.read(self.screen, 65536)
            except OSError:
                return
            if not piece:
                return
            self.text += piece.decode(errors="replace")
