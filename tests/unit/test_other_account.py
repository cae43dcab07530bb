"""A run of one account, ended with the credentials of another: whose empty list is no proof.

AWS is moto's server, which has both accounts; SkyPilot is the real one but for its API server. No machine is
real.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.backends.cloud_machine import CloudMachine
from launcher.backends.skypilot import cluster_teardown, provider_listings, sky_identity, sky_providers
from launcher.backends.skypilot.cluster_request import ClusterRequest
from launcher.backends.skypilot.provider_listings import OtherAccountError, ProviderListings
from launcher.backends.skypilot.standby_home import StandbyHome
from launcher.base.errors import EXIT_OK, LaunchError, TeardownUnverified
from launcher.base.home import Home
from launcher.base.processes import ProcessId
from launcher.records.records import RecordStore, RunRecord
from launcher.teardown import leftovers
from tests.support.played_aws import PlayedAws
from tests.support.typed import Typed

pytestmark = pytest.mark.process

EAST, WEST = "us-east-1", "us-west-2"
OWN, OTHER = "123456789012", "222222222222"  # moto's first, and one more
PROVIDER = {"name": "AWS", "cluster": "slip-0123abcd", "cluster_on_cloud": "c", "config": {"region": WEST}}
ACCOUNTS = {"aws": {"id": OWN, "profile": "default"}}


@pytest.fixture(scope="module")
def aws() -> Iterator[PlayedAws]:
    played = PlayedAws()
    yield played
    played.close()


@pytest.fixture
def user(aws: PlayedAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with two accounts; "default" is the one machines are rented in."""
    aws.forget()
    home = tmp_path / "user"
    aws.furnish(home)
    aws.add_account(home, "b", OTHER)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for what was asked for a moment ago."""
    monkeypatch.setattr(leftovers, "socket_parents", lambda: [])
    monkeypatch.setattr(cluster_teardown, "_SETTLE_SECONDS", 0.0)


def cut_off(store: RecordStore, accounts: dict[str, Any]) -> RunRecord:
    """A run that had asked for its machine when its launch was killed, and a guardian with it."""
    record = store.create(name="dev")
    machine = CloudMachine(record.id, store.folder(record.id), infra=["aws"], gpus="H100:4", idle_minutes=10)
    machine._order.accounts.update(accounts)
    machine._trying([f"aws/{EAST}"])
    gone = ProcessId(2**22, "long ago")
    changes = {"state": "arming", "launch": gone, "guardian": gone}
    return store.update(record.id, machine=machine.describe(), **changes)


def on_cloud(record: RunRecord) -> str:
    return f"{record.id}-{record.id.removeprefix('slip-')}"


@pytest.mark.usefixtures("at_once", "user")
def test_p04_another_accounts_empty_list_proves_nothing_and_the_hint_works(
    aws: PlayedAws, tmp_path: Path
) -> None:
    typed = Typed(tmp_path / "project", tmp_path / "home")
    store = RecordStore(Home.find({"LAUNCH_HOME": str(typed.home)}))
    record = cut_off(store, ACCOUNTS)
    aws.rent(EAST, on_cloud(record))
    aws.denied = {WEST}
    done = typed("down", "dev", AWS_PROFILE="b")
    assert done.returncode == TeardownUnverified.exit_code, done.stderr
    assert f"launched in account {OWN} (profile default), and account {OTHER} answers" in done.stderr
    hint = f"AWS_PROFILE=default launch down {record.id}"
    assert f"Hint: {hint}\n" in done.stderr
    assert store.load(record.id).state == "unverified" and aws.running(EAST) == 1

    variable, _, command = hint.partition(" ")
    done = typed(*command.split()[1:], **dict([variable.split("=")]))
    assert done.returncode == EXIT_OK, done.stderr
    assert store.load(record.id).state == "verified" and aws.running(EAST) == 0


class _Answering:
    """SkyPilot's process, where each provider answers what `says` has of it, to this account."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now: dict[str, Any] | None) -> None:
        self.says: list[str] | Exception = []

        def answer(provider: Any) -> list[str]:
            if isinstance(self.says, Exception):
                raise self.says
            return self.says

        def account() -> dict[str, Any]:
            if now is None:
                raise ValueError("AccessDenied")
            return now

        monkeypatch.setattr(sky_providers, "_listed", answer)
        monkeypatch.setitem(sky_identity._IDENTITY_CALLS, "aws", account)

    def call(self, name: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        """One of its calls."""
        if name == "rent_refused":
            return {"refused": "UnauthorizedOperation"}
        if name == "candidates":
            return {"providers": [PROVIDER], "unasked": []}
        return sky_providers.instances(**arguments)

    def listed(
        self, *tried: str, profile: str | None = "a", accounts: dict[str, Any] | None = None
    ) -> list[str]:
        """What a run of "own" that tried these regions learns. Raises what its teardown hears."""
        own = {"aws": {"id": "own", "profile": profile}} if accounts is None else accounts
        order = ClusterRequest("slip-0123abcd", ["aws"], "H100:4", accounts=own)
        double: Any = self
        asked = ProviderListings(order, lambda: [f"aws/{region}" for region in tried])
        ((_, found),) = asked.ask(double, [PROVIDER]).complete()
        return found


def test_p04_neither_emptiness_nor_a_refusal_of_another_account_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from botocore.exceptions import ClientError

    other = _Answering(monkeypatch, {"id": "other", "profile": "b"})
    denied = ClientError({"Error": {"Code": "UnauthorizedOperation", "Message": "no"}}, "DescribeInstances")
    for said in ([], denied):
        other.says = said
        with pytest.raises(OtherAccountError, match="AWS us-west-2"):
            other.listed(WEST)
        assert other.listed(EAST) == [], "no machine was ever asked for there"
    other.says = ["i-0123"]
    assert other.listed(WEST) == ["i-0123"]
    same = _Answering(monkeypatch, {"id": "own", "profile": "renamed"})
    for said in ([], denied):
        same.says = said
        assert same.listed(WEST) == []


def test_p04_where_nobody_says_whose_account_it_is_an_empty_list_proves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But of a record of an older version, where nobody knows whose it was."""
    silent = _Answering(monkeypatch, None)
    with pytest.raises(LaunchError, match="us-west-2 did not list") as raised:
        silent.listed(WEST)
    assert "the account that answered is unknown" in str(raised.value.why)
    assert not isinstance(raised.value, OtherAccountError), "it is asked again, in every way"
    assert silent.listed(EAST) == silent.listed(WEST, accounts={}) == []
    assert _Answering(monkeypatch, {"id": "other", "profile": "b"}).listed(WEST, accounts={}) == []


def test_p04_another_account_hides_no_other_place_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    other: Any = _Answering(monkeypatch, {"id": "other", "profile": "b"})

    def answer(provider: dict[str, Any]) -> list[str]:
        if provider["name"] == "Lambda":
            raise TimeoutError("no answer")
        return []

    monkeypatch.setattr(sky_providers, "_listed", answer)
    order = ClusterRequest(
        "slip-0123abcd", ["aws", "lambda"], "H100:4", accounts={"aws": {"id": "own", "profile": "a"}}
    )
    asked = ProviderListings(order, lambda: [f"aws/{WEST}", "lambda"])
    said = asked.ask(other, [PROVIDER, PROVIDER | {"name": "Lambda", "config": {}}])
    assert len(said.silent) == 2
    with pytest.raises(LaunchError) as raised:
        said.complete()
    assert not isinstance(raised.value, OtherAccountError)


def test_p04_a_guardians_stand_in_is_believed_no_more_than_the_runs_own_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other: Any = _Answering(monkeypatch, {"id": "other", "profile": "b"})
    ended: list[str] = []
    own: Any = SimpleNamespace(end=lambda: None, end_server=lambda: ended.append("server"))
    home: Any = SimpleNamespace(make=lambda: 1 / 0, remove=lambda: None)  # nothing can be written there
    order = ClusterRequest(
        "slip-0123abcd", ["aws"], "H100:4", accounts={"aws": {"id": "own", "profile": "a"}}
    )
    ending = cluster_teardown.ClusterTeardown(order, lambda: [f"aws/{WEST}"], home, own, lambda learned: None)
    ending.standby = StandbyHome(home, other)
    ending.down(None)
    proof = ending.proof(None)
    assert not proof.verified and "account other answers now" in proof.detail
    assert ended == ["server"], "no server of SkyPilot's is left behind"
    assert proof.hint == "AWS_PROFILE=a launch down slip-0123abcd"
    own_again: Any = _Answering(monkeypatch, {"id": "own", "profile": "a"})
    ending.standby = StandbyHome(home, own_again)
    ending.down(None)
    assert ending.proof(None).verified


@pytest.mark.parametrize(
    ("profile", "keys", "hint"),
    [
        ("a", False, "AWS_PROFILE=a launch down slip-0123abcd"),
        ("a", True, "env -u AWS_ACCESS_KEY_ID AWS_PROFILE=a launch down slip-0123abcd"),
        ("b", False, "launch down slip-0123abcd  # once the credentials here are those of account own"),
        (None, True, "launch down slip-0123abcd  # once the credentials here are those of account own"),
    ],
)
def test_p04_what_to_type_leads_to_the_runs_own_account(
    monkeypatch: pytest.MonkeyPatch, profile: str | None, keys: bool, hint: str
) -> None:
    for name in provider_listings._KEYS:
        monkeypatch.delenv(name, raising=False)
    if keys:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    with pytest.raises(OtherAccountError) as raised:
        _Answering(monkeypatch, {"id": "other", "profile": "b"}).listed(WEST, profile=profile)
    assert raised.value.hint == hint
