"""Room on the machine's disk that is kept for its end: on a real file system that is full (P6)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.backends.ssh import remote_staging
from runtime.ballast import Ballast
from tests.support.small_disk import said_on_small_disk


@pytest.mark.process
def test_p06_on_a_full_disk_the_timer_is_reset_files_are_staged_and_the_end_is_recorded(
    tmp_path: Path,
) -> None:
    ended, copied = said_on_small_disk("keep_on_full_disk.py", tmp_path)
    assert ended == {"resets": 2, "staged": None, "code": 0, "end": ["ended", "signal"]}
    assert copied == {**ended, "staged": True}


def test_p06_pieces_are_given_back_one_by_one_and_laid_down_again(tmp_path: Path) -> None:
    ballast = Ballast(tmp_path, pieces=2, piece_bytes=8192)
    assert not ballast.release(), "nothing is there before it is filled"
    ballast.fill()
    pieces = sorted((tmp_path / "ballast").iterdir())
    assert [it.stat().st_blocks * 512 for it in pieces] == [8192, 8192], "they take real room"
    assert ballast.release() and len(os.listdir(tmp_path / "ballast")) == 1
    assert not ballast.release(), "the last one is for the end"
    ballast.fill()
    assert len(os.listdir(tmp_path / "ballast")) == 2
    ballast.release_all()
    assert os.listdir(tmp_path / "ballast") == []


def test_p06_where_room_is_short_nothing_is_laid_down(tmp_path: Path) -> None:
    Ballast(tmp_path, pieces=1, piece_bytes=1 << 50).fill()
    assert list((tmp_path / "ballast").iterdir()) == []


def test_p06_staging_leaves_the_piece_for_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ballast = Ballast(tmp_path, pieces=3, piece_bytes=8192)
    ballast.fill()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(remote_staging, "_ROOM_BYTES", 1 << 62)  # so that any disk is a full one
    remote_staging.main({"newest": 1, "journals": {}})
    assert os.listdir("ballast") == ["2"]
    assert not ballast.release()
