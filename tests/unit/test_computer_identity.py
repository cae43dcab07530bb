"""computer_identity.py: a computer keeps its identity whatever its name is, and has no other's."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest

from launcher.backends.skypilot import orphaned_machines
from launcher.base import computer_identity


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def test_g08_a_machine_stays_ours_when_the_computer_is_given_another_name(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = orphaned_machines.home_label(home / "runs")
    monkeypatch.setattr(platform, "node", lambda: "another-name.of.another-network")
    assert orphaned_machines.home_label(home / "runs") == before
    assert orphaned_machines.home_label(home / "other" / "runs") != before


def test_g08_a_computer_is_the_same_again_when_the_home_was_deleted(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "machine-id").write_text("0123456789abcdef\n")
    monkeypatch.setattr(computer_identity, "_MACHINE_IDS", (tmp_path / "none", tmp_path / "machine-id"))
    monkeypatch.setattr(computer_identity, "_CONTAINER", ())
    before = orphaned_machines.home_label(home / "runs")
    shutil.rmtree(home)
    assert orphaned_machines.home_label(home / "runs") == before


def test_g08_containers_of_one_image_are_not_taken_for_one_another(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another one rents must not look like ours: gc would end it."""
    (tmp_path / "machine-id").write_text("of-the-image\n")
    (tmp_path / ".dockerenv").touch()
    monkeypatch.setattr(computer_identity, "_MACHINE_IDS", (tmp_path / "machine-id",))
    monkeypatch.setattr(computer_identity, "_CONTAINER", (tmp_path / ".dockerenv",))
    before = orphaned_machines.home_label(home / "runs")
    assert orphaned_machines.home_label(home / "runs") == before
    shutil.rmtree(home)
    assert orphaned_machines.home_label(home / "runs") != before


def test_g31_a_mac_is_known_by_its_network_card_and_never_by_a_made_up_one(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computer_identity, "_MACHINE_IDS", ())
    monkeypatch.setattr(computer_identity, "_CONTAINER", ())
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("uuid.getnode", lambda: 0x0012_3456_789A)
    assert computer_identity.of_this_computer(home) == "00123456789a"
    monkeypatch.setattr("uuid.getnode", lambda: 0x0112_3456_789A)
    made_up = computer_identity.of_this_computer(home / "other")
    assert len(made_up) == 32 and computer_identity.of_this_computer(home / "other") == made_up


def test_a_home_that_cannot_be_written_is_no_error(home: Path) -> None:
    home.write_text("a file in its place")
    assert computer_identity.of_this_computer(home)
