"""Machines that SkyPilot's books or our ledger have forgotten: found by the provider's tags, ended there.

No launch of SkyPilot's: what a lost one leaves behind is made by hand, with the tags it would have.
"""

from __future__ import annotations

import json

import pytest

from launcher.backends.skypilot import orphaned_machines
from tests.cloud.launched import collect
from tests.cloud.rig import Rig

pytestmark = pytest.mark.slow

_EAST, _WEST = "us-east-1", "us-west-2"


def _names(rig: Rig) -> tuple[str, str]:
    """A run's id, another one in each rig, and what its cluster is called at the provider."""
    return f"slip-{rig.id}", f"slip-{rig.id}-{rig.id}"


def _rent(rig: Rig, *machines: tuple[str, str, dict[str, str]]) -> list[str]:
    """Machines, each in a region, of a cluster, with more tags; their instance ids."""
    wanted = [(region, {"ray-cluster-name": cluster} | tags) for region, cluster, tags in machines]
    return rig.run_program("rent_tagged.py", json.dumps(wanted)).split()[-len(machines) :]


@pytest.mark.long  # in every run: test_played_ends.py's and test_denied_regions.py's
def test_g01_a_machine_the_books_never_had_is_found_in_any_region_and_ended_before_proof(rig: Rig) -> None:
    mine, cluster = _names(rig)
    others = (f"theirs-{rig.id}", f"{mine}-deadbeef", mine)
    here, there, *theirs = _rent(
        rig, (_EAST, cluster, {}), (_WEST, cluster, {}), *((_EAST, other, {}) for other in others)
    )
    said = rig.run_program("end_forgotten.py", mine)
    print(said)
    before, after = [line for line in said.splitlines() if line.startswith("Proof(")]
    assert before.startswith("Proof(verified=True, detail='no provider had been asked for anything'")
    assert after.startswith(f"Proof(verified=True, detail='no machine of {cluster} is listed by")
    assert "AWS us-east-1, AWS us-west-2" in after
    assert {one["id"] for one in rig.witness("terminate")} == {here, there}
    assert rig.alive() == theirs


def test_g08_gc_finds_a_machine_whose_record_is_gone_and_leaves_everyone_elses_alone(rig: Rig) -> None:
    run_id, cluster = _names(rig)
    home = rig.folder / "launch"
    label = {orphaned_machines.LABEL: orphaned_machines.home_label(home / "runs")}
    mine, *others = _rent(
        rig,
        (_WEST, cluster, label),
        (_EAST, f"theirs-{rig.id}", label),
        (_EAST, f"{run_id}-deadbeef", label),
        (_EAST, f"x{cluster}", label),
        (_EAST, "slip-89abcdef-89abcdef", {orphaned_machines.LABEL: "another home's"}),
        (_EAST, "slip-76543210-76543210", {}),
    )
    # Nothing was ever rented from here, says what is left of the ledger: nobody is asked.
    rig.faults("fail-describe")
    assert "earlier runs left nothing" in collect(rig).ok()
    assert not rig.witness("describe-refused")
    rig.faults("fail-describe", None)
    home.mkdir(exist_ok=True)
    (home / "clouds.json").write_text(json.dumps(["aws", "lambda"]))
    shown = collect(rig)
    print(shown.output)
    assert f"{mine} of {run_id} at AWS us-west-2" in shown.output
    assert shown.code == 5 and "Error: lambda could not be asked" in shown.output
    (answered,) = [line for line in shown.output.splitlines() if "asked AWS" in line]
    assert "AWS us-east-1" in answered and "AWS us-west-2" in answered
    assert "nothing was removed" in shown.output
    assert "slip-89abcdef" in shown.output and "left alone" in shown.output
    assert "lambda was not asked" in shown.output
    assert len(rig.alive()) == 1 + len(others)
    # Of AWS everything is known; where the account is denied a region, that is said.
    (home / "clouds.json").write_text(json.dumps(["aws"]))
    rig.faults("deny-region", "us-east-1")
    removed = json.loads(collect(rig, "--yes", "--json").ok().splitlines()[-1])
    assert "AWS us-west-2" in removed["answered"] and removed["denied"] == ["AWS us-east-1"]
    rig.faults("deny-region", None)
    assert [one["run_id"] for one in removed["found"]] == [run_id] and removed["removed"]
    assert [one["id"] for one in rig.witness("terminate")] == [mine]
    assert rig.alive() == others

    rig.faults("fail-describe")
    asked = collect(rig, "--infra", "aws")
    print(asked.output)
    assert "aws was not asked for machines of earlier runs" in asked.output
    assert rig.witness("describe-refused")
    assert asked.code == 5 and "Error: aws could not be asked" in asked.output
