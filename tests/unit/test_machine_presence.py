"""machine_presence.py: a machine is given up on its provider's word alone, asked now and then."""

from __future__ import annotations

import pytest

from launcher.backends import machine_presence
from launcher.backends.machine_presence import MachinePresence
from launcher.base.errors import JobFailed, LaunchError


class Provider:
    """What it lists from now on; None: it cannot be asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: list[list[str] | None] = []
        self.asked = 0
        self.clock = 0.0
        monkeypatch.setattr("time.monotonic", lambda: self.clock)
        monkeypatch.setattr("time.sleep", self.wait)

    def wait(self, seconds: float) -> None:
        self.clock += seconds

    def listed(self) -> list[str]:
        self.asked += 1
        answer = self.answers.pop(0)
        if answer is None:
            raise LaunchError("it cannot be asked", "no network", None)
        return answer


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Provider:
    return Provider(monkeypatch)


def test_a_machine_that_its_provider_lists_no_more_is_gone_for_good(provider: Provider) -> None:
    there = MachinePresence("slip-0123abcd", provider.listed)
    provider.answers = [[], []]
    with pytest.raises(JobFailed) as failed:
        there.raise_if_gone()
    assert failed.value.exit_code == 6
    assert "launch --resume slip-0123abcd" in (failed.value.hint or "")
    assert there.is_gone() and provider.asked == 2


def test_one_list_that_misses_it_is_not_enough(provider: Provider) -> None:
    there = MachinePresence("slip-0123abcd", provider.listed)
    provider.answers = [[], ["i-0"]]
    assert not there.is_gone()


def test_a_laptop_without_a_network_gives_no_machine_up_and_does_not_ask_all_the_time(
    provider: Provider,
) -> None:
    there = MachinePresence("slip-0123abcd", provider.listed)
    provider.answers = [None, ["i-0"], [], []]
    for _ in range(5):
        there.raise_if_gone()
    assert provider.asked == 1
    provider.wait(machine_presence._POLL_SECONDS)
    there.raise_if_gone()
    assert provider.asked == 2
    provider.wait(machine_presence._POLL_SECONDS)
    assert there.is_gone()
