"""journals.py: what a file of lines has more is added at home, and the rest is left as it is."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from launcher.results import journals


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    journals.append_new_lines(io.BytesIO(b"1\n2\n"), path)
    return path


def test_g22_what_is_new_is_added_to_the_file_that_is_there(home: Path) -> None:
    before = home.stat()
    assert journals.append_new_lines(io.BytesIO(b"1\n2\n3\nhalf"), home) == 2
    assert home.read_bytes() == b"1\n2\n3\n"
    assert home.stat().st_ino == before.st_ino
    after = home.stat().st_mtime_ns
    assert journals.append_new_lines(io.BytesIO(b"1\n2\n3\n"), home) == 0
    assert home.stat().st_mtime_ns == after, "nothing was new, nothing is written"


@pytest.mark.parametrize("there", [b"1\n", b"1\nx\n3\n", b"", b"another\n"])
def test_g22_what_began_again_takes_the_place_of_what_was_there(home: Path, there: bytes) -> None:
    journals.append_new_lines(io.BytesIO(there), home)
    assert home.read_bytes() == there


def test_g22_half_a_line_that_a_kill_left_is_removed(home: Path) -> None:
    for there in (b"1\n2\n", b"1\n2\n3\n"):
        with home.open("ab") as file:
            file.write(b"half")
        journals.append_new_lines(io.BytesIO(there), home)
        assert home.read_bytes() == there


def test_g22_a_full_disk_leaves_what_was_there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        journals.append_new_lines(io.BytesIO(b"1\n2\n3\n"), home)
    assert home.read_bytes() == b"1\n2\n"


def test_g22_a_long_file_is_known_by_all_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "long"
    lines = b"".join(b"%07d\n" % number for number in range(300_000))
    path.write_bytes(lines + b"x" * 3_000_000)
    count, digest = journals.known_prefix(path)
    assert count == len(lines)
    path.write_bytes(lines)
    assert journals.known_prefix(path) == (count, digest)
