"""Machines that SkyPilot's books or our ledger have forgotten: found by the provider's tags, ended there.

No launch of SkyPilot's: what a lost one leaves behind is made by hand, with the tags it would have.
"""

from __future__ import annotations

import json
import sys
import textwrap

import pytest

from launcher.machines import strays
from tests.cloud.launched import collect
from tests.cloud.rig import REPOSITORY, Rig

pytestmark = pytest.mark.slow

_MINE = "slip-0123abcd"

# What the test does on the laptop, each in a process of its own.
_RENT = """
import sys
from pathlib import Path
import boto3
from tests.cloud import bare
instance, _ = bare.rent(Path.cwd())
tags = [{"Key": key, "Value": value} for key, value in (tag.split("=") for tag in sys.argv[1:])]
boto3.client("ec2").create_tags(Resources=[instance], Tags=tags)
print(instance)
"""

_END = """
import json
from pathlib import Path
from launcher.machines.cloud import CloudMachine
kept = []
machine = CloudMachine(
    "slip-0123abcd", Path.cwd() / "run", infra=["aws"], gpus="H100:4", idle_minutes=10, variant="cpu",
    keep=kept.append,
)
print(machine.proof())
# Killed between the asking and the books' first entry: this is all that is known of the run.
described = machine.describe() | {"asked": True}
other = CloudMachine.described(described)
other.down()
print(other.proof())
assert not (Path.cwd() / "run" / "skypilot").exists()
"""


def _python(rig: Rig, program: str, *words: str, **environ: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(program), *words]
    return rig.run(command, seconds=180, environ=rig.environ(PYTHONPATH=str(REPOSITORY), **environ)).ok()


def _rent(rig: Rig, cluster: str, region: str = "us-east-1", **tags: str) -> str:
    words = [f"ray-cluster-name={cluster}", *(f"{key}={value}" for key, value in tags.items())]
    return _python(rig, _RENT, *words, AWS_DEFAULT_REGION=region).split()[-1]


def test_g01_a_machine_the_books_never_had_is_found_in_any_region_and_ended_before_proof(rig: Rig) -> None:
    here, there = _rent(rig, f"{_MINE}-0123abcd"), _rent(rig, f"{_MINE}-0123abcd", "us-west-2")
    others = [_rent(rig, "theirs-0123abcd"), _rent(rig, f"{_MINE}-deadbeef"), _rent(rig, _MINE)]
    said = _python(rig, _END)
    print(said)
    before, after = [line for line in said.splitlines() if line.startswith("Proof(")]
    assert before == "Proof(verified=True, detail='nothing had been asked of a provider')"
    assert after.startswith("Proof(verified=True, detail='no machine of slip-0123abcd-0123abcd is listed by")
    assert "AWS us-east-1, AWS us-west-2" in after
    assert {one["id"] for one in rig.witness("terminate")} == {here, there}
    assert rig.alive() == others


def test_g08_gc_finds_a_machine_whose_record_is_gone_and_leaves_everyone_elses_alone(rig: Rig) -> None:
    home = rig.folder / "launch"
    label = {strays.LABEL: strays.mark(home / "runs")}
    mine = _rent(rig, f"{_MINE}-0123abcd", "us-west-2", **label)
    others = [
        _rent(rig, "theirs-0123abcd", **label),
        _rent(rig, f"{_MINE}-deadbeef", **label),
        _rent(rig, f"x{_MINE}-0123abcd", **label),
        _rent(rig, "slip-89abcdef-89abcdef", **{strays.LABEL: "another home's"}),
        _rent(rig, "slip-76543210-76543210"),
    ]
    # Nothing was ever rented from here, says what is left of the ledger: nobody is asked.
    assert "nothing is left" in collect(rig).ok()
    assert not rig.witness("describe")
    (home / "clouds.json").write_text(json.dumps(["aws", "lambda"]))
    shown = collect(rig)
    print(shown.output)
    assert f"{mine} of {_MINE} at AWS us-west-2" in shown.ok()
    assert "nothing was removed" in shown.output
    assert "slip-89abcdef" in shown.output and "left alone" in shown.output
    assert "lambda was not asked" in shown.output
    assert len(rig.alive()) == 1 + len(others)
    removed = json.loads(collect(rig, "--yes", "--json").ok().splitlines()[-1])
    assert [one["run_id"] for one in removed["found"]] == [_MINE] and removed["removed"]
    assert [one["id"] for one in rig.witness("terminate")] == [mine]
    assert rig.alive() == others


def test_g08_gc_says_that_a_provider_did_not_answer_and_goes_on(rig: Rig) -> None:
    rig.faults("fail-describe")
    asked = collect(rig, "--infra", "aws")
    print(asked.output)
    assert "aws was not asked for machines of earlier runs" in asked.ok()
    assert "nothing is left" in asked.output
