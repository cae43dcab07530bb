"""Runs a command and forwards its output: unchanged to a file or a pipe, sanitized to a terminal.

Neighbours: `cli/remote_verbs.py` runs ssh by it; `base/sanitize.py` filters text for a terminal.
"""

from __future__ import annotations

import codecs
import os
import subprocess
from collections.abc import Sequence

from launcher.base import descriptor_polling, sanitize

_BYTES = 65536
_POLL_SECONDS = 0.1


def run(words: Sequence[str], stdout: int = 1, stderr: int = 2) -> int:
    """Run it to its end with these descriptors; its exit code, negative if a signal ended it."""
    terminals = {target: os.ttyname(target) for target in (stdout, stderr) if os.isatty(target)}
    # One way where both lead to one terminal, so that the output keeps its order.
    ways = {
        name: _SanitizedPipe(target) for name, target in {name: it for it, name in terminals.items()}.items()
    }
    ends = {target: ways[name].writing for target, name in terminals.items()}
    process = subprocess.Popen(words, stdout=ends.get(stdout, stdout), stderr=ends.get(stderr, stderr))
    for way in ways.values():
        os.close(way.writing)
    try:
        _forward_all(process, [*ways.values()])
        return process.wait()
    except BaseException:  # an interruption goes on; the command does not
        process.kill()
        process.wait()
        raise
    finally:
        for way in ways.values():
            way.close()


class _SanitizedPipe:
    """From the command to one terminal."""

    def __init__(self, target: int) -> None:
        self.reading, self.writing = os.pipe()
        self._target = target
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._log = sanitize.LogStream()

    def forward(self) -> bool:
        """The next piece; False at its end."""
        piece = os.read(self.reading, _BYTES)
        self._show(self._log.feed(self._decoder.decode(piece, final=not piece)))
        return bool(piece)

    def close(self) -> None:
        self._show(self._log.end())
        os.close(self.reading)

    def _show(self, text: str) -> None:
        view = memoryview(text.encode(errors="replace"))
        while view:
            view = view[os.write(self._target, view) :]


def _forward_all(process: subprocess.Popen[bytes], ways: list[_SanitizedPipe]) -> None:
    """Forward until the process ends. A child of ssh may hold a pipe open and is not waited for."""
    left = {way.reading: way for way in ways}
    while left:
        ended = process.poll() is not None
        ready = descriptor_polling.wait_readable([*left], 0 if ended else _POLL_SECONDS)
        if ended and not ready:
            return
        for descriptor in ready:
            if not left[descriptor].forward():
                del left[descriptor]
