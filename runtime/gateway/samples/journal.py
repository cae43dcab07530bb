"""The append-only journal of samples: `samples/000001.jsonl`, one line per answered request.

Neighbours: samples.py indexes it. A line is written in one `write`, so it survives the kill of any process; a
line cut short by a power loss is skipped on reading. Every process appends to a file of its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

FILE_BYTES = 64 * 1024 * 1024

Purpose = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion in the engine's own token ids; `logprobs`: one per completion id, at the temperature."""

    id: str
    # Index into the exchange's `prompts`.
    prompt: int
    completion_ids: list[int]
    logprobs: list[float | None]
    finish_reason: str | None
    # Why it can never be trained on; None: it can.
    unscorable: str | None = None
    # Its name by content (content_key.py), where its request had no tag.
    content: str | None = None
    # The digest of the white space around its text, which is not in the name, if it has such a name.
    around: str = ""
    # It was not sampled: a client gave the text, and the engine these ids and logprobs of it.
    retokenised: bool = False
    # The name of the conversation that it ends (conversation_names.py), where it is an answer of a chat.
    turn: str | None = None
    # Its client was given the first of its calls alone.
    has_more_calls: bool = False


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a request."""

    rollout: str | None = None
    predictor: str | None = None
    call: int | None = None
    purpose: Purpose = "train"


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat's place among other conversations (conversation_names.py), and the answer it continued."""

    question: str
    # The same, without the content of its system messages.
    bare: str
    tools: str = ""
    # The sample it goes on from, id for id.
    continues: str | None = None
    # Why it does not, though it is a later turn of a conversation that was held here.
    apart: str | None = None
    # The prompt that the chat template alone would have made, if the real one differs: its digest and length.
    shown: str | None = None
    shown_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Exchange:
    """One answered request: its settings, its samples, and the answer as the client got it."""

    request: str
    digest: str
    created: float
    tags: Tags
    # The versioned name and the policy version behind it.
    model: str
    version: int
    temperature: float
    settings: dict[str, Any]
    prompts: list[list[int]]
    samples: list[Sample]
    streamed: bool
    # The answer's JSON; of a stream, its text as one JSON string.
    answer: msgspec.Raw
    # False: it is not known to be received, and it is no sample. A later `DeliveryConfirmed` makes it one.
    delivered: bool
    # The question, where a client may name it by its parsed fields (parsed_fields.py).
    messages: list[Any] | None = None
    conversation: Conversation | None = None


@dataclass(frozen=True, slots=True)
class DeliveryConfirmed:
    """The answer of this request was received after all, or again."""

    claim: str


@dataclass(frozen=True, slots=True)
class DeliveryUncertain:
    """The connection broke after this request's answer: if the same call comes again, that one counts."""

    doubt: str


@dataclass(frozen=True, slots=True)
class DeliveryLost:
    """The answer of this request was recorded as received, and was not."""

    loss: str


DeliveryEvent = DeliveryConfirmed | DeliveryUncertain | DeliveryLost


@dataclass(frozen=True, slots=True)
class LineLocation:
    """The location of a line."""

    file: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class SampleEntry:
    """The part of a sample that the index needs."""

    id: str
    unscorable: str | None = None
    content: str | None = None
    around: str = ""
    retokenised: bool = False
    turn: str | None = None


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """The part of a line that the index needs; the long arrays are skipped, not built. Of a
    `DeliveryEvent`, nothing else."""

    claim: str | None = None
    doubt: str | None = None
    loss: str | None = None
    request: str = ""
    digest: str = ""
    tags: Tags = Tags()
    version: int = 0
    samples: list[SampleEntry] = field(default_factory=list)
    delivered: bool = True
    conversation: Conversation | None = None


@dataclass(frozen=True, slots=True)
class ExchangeText:
    """The text of an exchange, without its tokens."""

    streamed: bool
    answer: msgspec.Raw
    messages: list[Any] | None = None


_ENCODER = msgspec.json.Encoder()
_EXCHANGE = msgspec.json.Decoder(Exchange)
_TEXT = msgspec.json.Decoder(ExchangeText)
_INDEX_ENTRY = msgspec.json.Decoder(IndexEntry)


class Journal:
    """Appends lines and reads them back by place. One thread appends; any may read."""

    def __init__(self, folder: Path, file_bytes: int = FILE_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file_bytes = file_bytes
        self._readers: dict[int, int] = {}
        # Held while a file is looked for among them, or a second thread would open it again.
        self._opening = threading.Lock()
        self._newest = max(self._files(), default=0)
        self._writer: int | None = None
        self._begin_file()

    def append(self, line: Exchange | DeliveryEvent) -> LineLocation:
        """Write one line. Raises OSError when the disk does not take it."""
        writer = self._writer
        if writer is None or self._size > self._file_bytes:
            writer = self._begin_file()
        encoded = _ENCODER.encode(line) + b"\n"
        written = os.write(writer, encoded)
        place = LineLocation(self._file, self._size, written)
        self._size += written
        if written < len(encoded):
            self._close()  # the half line must not run into the next one
            raise OSError(f"samples: only {written} of {len(encoded)} bytes were written; is the disk full?")
        return place

    def read(self, place: LineLocation) -> Exchange:
        """The exchange at that location."""
        return _EXCHANGE.decode(self._line(place))

    def read_text(self, place: LineLocation) -> ExchangeText:
        """The text of the exchange at that location."""
        return _TEXT.decode(self._line(place))

    def _line(self, place: LineLocation) -> bytes:
        with self._opening:
            reader = self._readers.get(place.file)
            if reader is None:
                reader = self._readers[place.file] = os.open(self._path(place.file), os.O_RDONLY)
        return os.pread(reader, place.length, place.offset)

    def index_entries(self) -> Iterator[tuple[LineLocation, IndexEntry]]:
        """Every whole line of earlier processes, in the order written."""
        for number in self._files():
            offset = 0
            with open(self._path(number), "rb") as lines:
                for line in lines:
                    place = LineLocation(number, offset, len(line))
                    offset += len(line)
                    try:
                        yield place, _INDEX_ENTRY.decode(line)
                    except msgspec.DecodeError:
                        continue  # cut short when the machine stopped

    def _begin_file(self) -> int:
        """Write into a new one from now on. Raises OSError; then the next line tries again."""
        self._newest += 1
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        writer = os.open(self._path(self._newest), flags, 0o600)
        self._close()
        self._file, self._size, self._writer = self._newest, 0, writer
        return writer

    def _close(self) -> None:
        """Nothing is written to a number that was closed: it is another file's soon, or a client's."""
        if self._writer is not None:
            os.close(self._writer)
            self._writer = None

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}.jsonl"

    def _files(self) -> list[int]:
        return sorted(int(path.stem) for path in self._folder.glob("*.jsonl") if path.stem.isdigit())
