"""The names of clusters: ours alone, short enough for every cloud, whatever a run is called."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.backends.cloud_machine import CloudMachine
from launcher.base.errors import UsageError
from launcher.base.home import Home
from launcher.records.records import RecordStore
from launcher.types.clouds import KNOWN_CLOUDS
from tests.support.environment import PROGRAMS

NAMES = st.one_of(st.none(), st.from_regex(r"[a-z0-9-]{1,40}", fullmatch=True), st.text(max_size=50))


@pytest.mark.process
def test_g10_every_run_is_a_cluster_of_its_own_whatever_it_is_called(tmp_path: Path) -> None:
    """slip-<8 hex>, at most 20 characters, of the run's id alone: two names can never meet on a cloud."""
    seen: set[str] = set()
    store = RecordStore(Home(tmp_path / "data", tmp_path / "config", tmp_path / "cache"))

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(NAMES)
    def create(name: str | None) -> None:
        try:
            record = store.create(name=name)
        except UsageError:
            return
        place = {"infra": ["aws"], "gpus": "H100:4", "idle_minutes": 10}
        cluster = CloudMachine(record.id, tmp_path / "run", **place).describe()["run_id"]
        assert re.fullmatch(r"slip-[0-9a-f]{8}", cluster) and len(cluster) <= 20
        assert cluster not in seen
        seen.add(cluster)
        store.update(record.id, state="verified", ended=1.0)

    create()
    assert len(seen) > 20


@pytest.mark.slow
def test_g10_no_cloud_cuts_a_name_or_makes_two_alike(tmp_path: Path) -> None:
    """What one cloud shortens, it would have to tell apart by a hash: none has to."""
    ids = [f"slip-{number:08x}" for number in (0, 1, 0xFFFFFFFF, *range(0x0123ABCD, 0x0123ABCD + 200))]
    done = subprocess.run(
        [sys.executable, PROGRAMS / "unit" / "names_on_clouds.py"],
        input=json.dumps([ids, sorted(KNOWN_CLOUDS)]),
        env={"HOME": str(tmp_path), "SKYPILOT_USER_ID": "0123abcd", "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    for cloud, names in json.loads(done.stdout).items():
        assert len(set(names)) == len(ids), cloud
        for one, name in zip(ids, names, strict=True):
            assert name.startswith(one) and name == name.lower(), (cloud, name)
