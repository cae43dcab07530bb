"""A login that ends in mid-run: the guardian goes on until there is another, and the machine is proven gone.

AWS is moto's server, which refuses the keys of a session that has ended; the guardian, SkyPilot and the
`credential_process` are real processes, as `aws-vault` has them: the keys in hand are used until they fail.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.backends.cloud_machine import CloudMachine
from launcher.base.home import Home
from launcher.base.module_command import module_command
from launcher.records.records import RecordStore
from launcher.teardown import guardian
from tests.support.played_aws import PlayedAws
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.long]  # two ends of a rented machine by real SkyPilot

# Without an end: who has such keys learns by a refusal that their session is over.
_LOGIN = """#!/bin/sh
test -e "{there}/logged-in" || {{ echo "the session has ended: log in again" >&2; exit 1; }}
printf '{{"Version": 1, "AccessKeyId": "ASIA%016d", "SecretAccessKey": "s", "SessionToken": "t"}}' $$
"""
_CALLS_OF_A_KEY = 2
_BOUND_SECONDS = 600.0


@pytest.fixture
def aws() -> Iterator[PlayedAws]:
    played = PlayedAws()
    played.forget()
    yield played
    played.close()


class Rented:
    """A machine of a run whose launch is about to die, and its guardian; the user's login is a script's."""

    def __init__(self, aws: PlayedAws, folder: Path) -> None:
        self.aws = aws
        self.user = folder / "user"
        aws.furnish(self.user)
        (self.user / ".aws" / "credentials").unlink()
        login = folder / "login"
        login.write_text(_LOGIN.format(there=folder))
        login.chmod(0o755)
        with (self.user / ".aws" / "config").open("a") as config:
            config.write(f"credential_process = {login}\n")
        self.logged_in = folder / "logged-in"
        self.logged_in.touch()
        self.store = RecordStore(Home(folder, folder, folder))
        record = self.store.create(name="dev", details={})
        self.id = record.id
        self.folder = self.store.folder(self.id)
        machine = CloudMachine(self.id, self.folder, infra=["aws"], gpus="H100:4", idle_minutes=10)
        asked = {"asked": True, "tried": ["aws/us-east-1"]}
        self.store.update(self.id, machine=machine.describe() | asked, state="work")
        self.machine = aws.rent("us-east-1", f"{self.id}-{self.id.removeprefix('slip-')}")

    def guard(self) -> subprocess.Popen[bytes]:
        """Its guardian at the moment the launch is gone."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        with (self.folder / guardian.LOG).open("ab") as log:
            return subprocess.Popen(
                [*module_command("launcher.teardown.guardian"), str(self.store.path(self.id))],
                env=kept | {"HOME": str(self.user)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    @property
    def said(self) -> str:
        return (self.folder / guardian.LOG).read_text()

    @property
    def state(self) -> str:
        return self.store.load(self.id).state


def test_p05_a_login_that_ends_while_the_guardian_works_is_waited_for_and_the_machine_proven_gone(
    aws: PlayedAws, tmp_path: Path
) -> None:
    """The first key is refused, as its session is over, and there is no other until the user has logged in.
    From then on one that is used up is followed by another: each is good for two calls, and to end a machine
    takes three."""
    rented = Rented(aws, tmp_path)
    used: Counter[str] = Counter()
    refused: list[str] = []

    def expired(key: str) -> bool:
        used[key] += 1
        if refused and used[key] <= _CALLS_OF_A_KEY:
            return False
        if not refused:
            rented.logged_in.unlink()
        refused.append(key)
        return True

    aws.expired = expired
    watch = rented.guard()
    try:
        wait_until(lambda: rented.state == "unverified", _BOUND_SECONDS, lambda: rented.said)
        assert len(refused) == 1 and aws.state("us-east-1", rented.machine) == "running"
        rented.logged_in.touch()
        assert watch.wait(_BOUND_SECONDS) == 0, rented.said
    finally:
        watch.kill()
        watch.wait()
    assert len(refused) > 1, "the new keys were used up as well"
    ended = rented.store.load(rented.id)
    assert (ended.state, ended.ended_by) == ("verified", "guardian"), rented.said
    assert aws.state("us-east-1", rented.machine) == "terminated"
    assert ended.proof is not None and "is listed by AWS us-east-1" in ended.proof["detail"]
