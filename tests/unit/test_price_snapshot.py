"""The prices that come with the package: dated, only for plans, and never in the place of catalogs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from launcher.backends.skypilot import price_snapshot, prices
from launcher.base.errors import PreflightError
from launcher.types.clouds import KNOWN_CLOUDS, SELF_HOSTED
from runtime.shared import gpu_memory
from tests.support.environment import PROGRAMS
from tests.support.typed import Typed

pytestmark = pytest.mark.process

_PINNED = re.compile(
    r"github\.com/skypilot-org/skypilot-catalog/blob/[0-9a-f]{40}/catalogs/v8/[a-z]+/vms\.csv"
)
CATALOGS = Path(__file__).resolve().parents[1] / "cloud" / "catalogs"


@pytest.fixture
def user_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh computer: no account, no catalog."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "CLOUDSDK_", "GCP_", "AZURE_", "KUBECONFIG", "RUNPOD_")):
            monkeypatch.delenv(name)
    home = tmp_path / "user"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.fixture
def typed(tmp_path: Path, user_home: Path, monkeypatch: pytest.MonkeyPatch) -> Typed:
    """Nothing is started for it: not SkyPilot either, which may not be installed."""
    monkeypatch.setattr("subprocess.Popen", lambda *words, **options: pytest.fail(f"started {words}"))
    return Typed(tmp_path / "project", tmp_path / "home")


def test_each_price_has_its_day_and_its_source() -> None:
    known = price_snapshot.prices()
    assert {price.cloud for price in known} <= KNOWN_CLOUDS - SELF_HOSTED
    for price in known:
        assert price.price_per_hour > 0 and price.count > 0 and price.instance_type
        assert _PINNED.fullmatch(price.source), "one version of SkyPilot's catalog, for anybody to look up"
        assert f"/v8/{price.cloud}/" in price.source
        assert gpu_memory.memory_bytes(price.gpu) is not None, "else it would be no GPU's name"
        assert date(2026, 1, 1) <= date.fromisoformat(price.read) <= date.today()


@pytest.mark.parametrize("account", [None, ".aws", ".lambda_cloud"])
def test_g26_on_a_fresh_computer_the_plan_is_a_table_with_the_date_of_its_prices(
    typed: Typed, user_home: Path, account: str | None
) -> None:
    if account:
        (user_home / account).mkdir()
    done = typed("plan", "--gpus", "H100:4")
    assert done.returncode == 0, done.stderr
    (cheapest,) = price_snapshot.market("H100", 4, ("lambda",)).offers
    table = done.stdout.splitlines()
    price = f"${cheapest.price_per_hour:.2f}/h"
    assert table[0].startswith(f"Fits: 4×H100 on lambda, {price}, deadline 4h: at most $")
    (read,) = {price.read for price in price_snapshot.prices() if price.cloud == "lambda"}
    assert any("prices" in line and "snapshot" in line and read in line for line in table)
    assert any(line.split()[:2] == ["lambda", "gpu_4x_h100_sxm5"] for line in table)
    assert done.stderr.splitlines()[-1] == (
        "there are no price catalogs on this computer, and a run needs one: "
        "launch plan --gpus H100:4 --infra lambda --refresh"
    )
    limits = (
        "--infra",
        "lambda,aws",
        "--train-gpus",
        "2",
        "--budget",
        "40",
        "--max-price",
        "30",
        "--max",
        "90m",
    )
    words = ("--gpus", "H100:4", *limits, "--set", "train.loss=dapo")
    hint = typed("plan", *words).stderr.splitlines()[-1].partition(": ")[2]
    assert set(shlex.split(hint)) == {"launch", "plan", *words, "1h30m", "--refresh"} - {"90m"}, (
        "as it was typed"
    )
    assert json.loads(typed("plan", "--gpus", "H100:4", "--json").stdout)["prices_of"] == read
    assert not typed.home.exists()


def test_g26_the_plan_of_a_fresh_computer_needs_no_network_terminal_or_skypilot(
    tmp_path: Path, user_home: Path
) -> None:
    program = PROGRAMS / "unit" / "launch_on_loopback.py"
    words = ["plan", "--gpus", "H100:4"]
    done = subprocess.run(
        ["unshare", "--net", "--map-root-user", sys.executable, program, *words],
        env={"HOME": str(user_home), "LAUNCH_HOME": str(tmp_path / "home"), "PATH": os.environ["PATH"]},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "a snapshot that came with launch" in done.stdout


def test_g11_a_run_is_never_agreed_to_by_the_snapshot(typed: Typed, user_home: Path) -> None:
    words = ["--gpus", "H100:4", "--yes", "--", "true"]
    refused = typed(*words)
    assert refused.returncode == 3 and "no cloud account is set up" in refused.stderr
    assert not typed.home.exists()


def test_what_the_snapshot_does_not_have_is_not_said_to_be_nowhere(typed: Typed) -> None:
    other_counts = "the price snapshot that comes with launch has "
    only_catalogs = "prices come from SkyPilot's catalogs, which launch fetches only on request"
    for gpus, infra, clouds, why in (
        ("H100:4", "aws", "aws", f"{other_counts}H100:8 and H100:1 on aws"),
        ("h100:4", "aws,gcp", "aws, gcp", f"{other_counts}H100:8 and H100:1 on aws, none on gcp"),
        ("H100:3", "aws/us-east-1,lambda", "aws, lambda",
         f"{other_counts}H100:8 and H100:1 on aws/us-east-1; H100:8, H100:4, H100:2 and H100:1 on lambda"),
        ("H100:8", "aws/us-west-2", "aws", only_catalogs),
        ("L4:1", "lambda", "lambda", only_catalogs),
        ("H100:4", "azure", "azure", only_catalogs),
    ):  # fmt: skip
        done = typed("plan", "--gpus", gpus, "--infra", infra)
        assert done.returncode == 3
        assert done.stderr.splitlines()[-3:] == [
            f"Error: there are no prices for {clouds} on this computer",
            f"  {why}",
            f"Hint: launch plan --gpus {gpus} --infra {infra} --refresh",
        ]
        assert "no --model: the rented GPUs would train tiny" in done.stderr


def test_a_price_of_one_region_is_not_that_of_another() -> None:
    known = [offer.infra for offer in price_snapshot.market("H100", 8, ("aws", "lambda/us-west-1")).offers]
    assert known == ["lambda/us-west-1", "aws/us-east-1"]
    assert price_snapshot.market("H100", 8, ("aws/us-west-2",)).without_prices == ("aws",)


def test_catalogs_on_this_computer_come_before_the_snapshot(user_home: Path) -> None:
    assert prices.places_to_show((), user_home, {}) == ()
    (user_home / ".lambda_cloud").mkdir()
    assert prices.places_to_show((), user_home, {}) == ()
    shutil.copytree(CATALOGS, user_home / ".sky" / "catalogs")
    assert prices.with_catalog(user_home) == {"aws"}
    assert prices.places_to_show(("aws/us-east-1", "lambda"), user_home, {}) == ("aws/us-east-1", "lambda")
    assert prices.places_to_show(("kubernetes",), user_home, {}) == ("kubernetes",)
    (user_home / ".lambda_cloud").rmdir()
    assert prices.places_to_show((), user_home, {}) == ("aws",)
    with pytest.raises(PreflightError, match="no cloud account"):
        prices.places((), user_home, {})
