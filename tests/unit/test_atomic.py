"""atomic.py: a file is whole or as it was, however its writing ends."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from launcher.base import atomic


def test_what_is_written_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    for content in ("one", b"two"):
        atomic.write(path, content)
    assert path.read_bytes() == b"two" and os.listdir(tmp_path) == ["answers.json"]


@pytest.mark.parametrize("locked", [True, False])
def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, locked: bool) -> None:
    """A folder cannot be replaced by a file; only the next writer who is as alone takes up what is left."""
    (tmp_path / "taken" / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="taken"):
        atomic.write(tmp_path / "taken", "text", locked=locked)
    assert (tmp_path / "taken" / "inside").is_dir()
    assert sorted(os.listdir(tmp_path)) == ([".taken.tmp", "taken"] if locked else ["taken"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk is Linux's /dev/full")
def test_a_full_disk_leaves_what_was_there_and_room_is_enough_to_go_on(tmp_path: Path) -> None:
    path, aside = tmp_path / "record.json", tmp_path / ".record.json.tmp"
    path.write_text("before")
    aside.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        atomic.write(path, "after", locked=True)
    assert path.read_text() == "before"
    aside.unlink()
    aside.write_text("half of what a killed writer had, and longer than what comes")
    atomic.write(path, "after", locked=True)
    assert path.read_text() == "after" and not aside.exists()


def test_a_private_file_is_the_users_alone(tmp_path: Path) -> None:
    atomic.write(tmp_path / "config", "Host", private=True)
    assert stat.S_IMODE((tmp_path / "config").stat().st_mode) == 0o600


def test_text_that_is_no_utf_8_comes_back_as_it_was(tmp_path: Path) -> None:
    atomic.write(tmp_path / "config", b"# caf\xe9\n".decode(errors="surrogateescape"))
    assert (tmp_path / "config").read_bytes() == b"# caf\xe9\n"


def test_durable_has_the_file_on_the_disk_before_its_name_and_then_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.json"
    seen: list[tuple[bool, bool]] = []
    really = os.fsync

    def noting(descriptor: int) -> None:
        seen.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), path.exists()))
        really(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    atomic.write(path, "text")
    assert not seen
    path.unlink()
    atomic.write(path, "text", durable=True)
    assert seen == [(False, False), (True, True)]


def test_writers_at_once_each_leave_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    texts = [letter * 100_000 for letter in "abcd"]
    atomic.write(path, texts[0])
    writers = [threading.Thread(target=_write_often, args=(path, text)) for text in texts]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_text() in texts
    assert os.listdir(tmp_path) == ["answers.json"]


def _write_often(path: Path, text: str) -> None:
    for _ in range(20):
        atomic.write(path, text)
