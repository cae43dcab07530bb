"""The run's own log, `launch.log`: every message and every traceback, never a secret.

Neighbours: `output.py` logs what it shows, `main.py` logs tracebacks. Knows nothing of runs.
"""

from __future__ import annotations

import base64
import contextlib
import io
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

LOGGER = logging.getLogger("launcher")
LOGGER.addHandler(logging.NullHandler())  # before there is a file, nothing goes to stderr
_FORMAT = "%(asctime)s %(levelname)s %(message)s"
_MIN_SECRET_LENGTH = 8  # shorter values would blank out ordinary words
# Of a log of ours; the one before it is kept beside it, under the name that `before` gives it.
MAX_BYTES = 8 << 20


class Redactor(logging.Formatter):
    """Formats records, tracebacks included, with every known secret replaced by `***`."""

    def __init__(self) -> None:
        super().__init__(_FORMAT)
        self._secrets: set[str] = set()

    def hide(self, secrets: Iterable[str]) -> None:
        """Never write these values from now on, nor a single line of a value with several."""
        for secret in secrets:
            for part in {secret, *secret.splitlines()}:
                if len(part) >= _MIN_SECRET_LENGTH:
                    self._secrets |= _spellings(part)

    @property
    def spellings(self) -> list[str]:
        """All hidden texts, for another process that writes on our behalf."""
        return sorted(self._secrets)

    def add_spellings(self, spellings: Iterable[str]) -> None:
        """Hide these texts literally: another process's `spellings`."""
        self._secrets.update(spellings)

    @property
    def max_length(self) -> int:
        """The length of the longest secret: a text's end of this length may be the beginning of one."""
        return max(map(len, self._secrets), default=0)

    def format(self, record: logging.LogRecord) -> str:
        return self.redact(super().format(record))

    def redact(self, text: str) -> str:
        """`text` without the secrets, plain, in a URL or in base64."""
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


def _spellings(secret: str) -> set[str]:
    """The forms of a secret in a text: as it is, in a URL, and in base64, alone or inside something
    longer."""
    raw = secret.encode(errors="surrogateescape")
    found = {secret, quote(raw, safe=""), quote(raw)}
    for before in range(3):
        coded = base64.b64encode(bytes(before) + raw).decode()
        # Its first and last letters depend on the text beside the secret.
        inner = coded[(0, 2, 3)[before] : (before + len(raw)) * 8 // 6]
        found |= {inner, inner.replace("+", "-").replace("/", "_")}
    return found


def rotated(log: Path) -> Path:
    """The path of the full log that came before this one."""
    return log.with_name(f"{log.name}.1")


class _RotatingHandler(logging.FileHandler):
    """A bounded file, perhaps on a full disk: a line lost there is not worth a traceback in the terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        """One more line; a full file is begun anew, with the one before it kept."""
        with contextlib.suppress(OSError):
            if self.stream is not None and self.stream.tell() > MAX_BYTES:
                self.close()
                self.stream = None  # type: ignore[assignment] - the next line opens it again
                os.replace(self.baseFilename, rotated(Path(self.baseFilename)))
        super().emit(record)

    def _open(self) -> io.TextIOWrapper:
        """Open the file for this user alone, each time."""
        return open(  # type: ignore[return-value] - text, as it is opened
            self.baseFilename, self.mode, encoding=self.encoding, opener=_open_private
        )

    def handleError(self, record: logging.LogRecord) -> None:
        """The line is lost, the run goes on."""

    def close(self) -> None:
        """Text still in its buffer is lost as well."""
        with contextlib.suppress(OSError):
            super().close()


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


REDACTOR = Redactor()


def open_log(path: Path) -> None:
    """Append the records of `LOGGER` to this file (0600) from now on, and to no other."""
    close_log()
    handler = _RotatingHandler(path, encoding="utf-8")
    handler.setFormatter(REDACTOR)
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.DEBUG)
    LOGGER.propagate = False


def close_log() -> None:
    """Close the file."""
    for handler in list(LOGGER.handlers):
        if isinstance(handler, logging.FileHandler):
            LOGGER.removeHandler(handler)
            handler.close()


def log_path() -> Path | None:
    """The path of the open log file."""
    for handler in LOGGER.handlers:
        if isinstance(handler, logging.FileHandler):
            return Path(handler.baseFilename)
    return None
