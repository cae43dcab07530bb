"""Prices are SkyPilot's own, read from hand-made catalogs by the real one: offline, with nobody's keys."""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.backends.skypilot import prices, sky_cache
from launcher.backends.skypilot.sky_home import SkyHome
from launcher.backends.skypilot.sky_process import SkyProcess
from launcher.base.errors import PreflightError
from tests.support.environment import PROGRAMS, python_with

CATALOGS = Path(__file__).resolve().parents[1] / "cloud" / "catalogs"
_GPU_INFO = "\"{'Gpus': [{'Name': 'A100', 'MemoryInfo': {'SizeInMiB': 40960}}]}\""
# There a GPU has a row of its own, and so has the host it is attached to.
GCP = f"""\
InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,AvailabilityZone,Price,SpotPrice
,,,A100,4.0,{_GPU_INFO},us-central1,us-central1-a,11.0,4.0
a2-highgpu-4g,48.0,340.0,,,,us-central1,us-central1-a,3.5,1.0
"""
LAMBDA = f"""\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice
gpu_4x_a100,A100,4.0,120.0,800.0,5.16,us-east-1,{_GPU_INFO},
gpu_8x_a100,A100,8.0,240.0,1600.0,,us-east-1,{_GPU_INFO},
"""


@pytest.fixture(scope="module")
def user_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's home with old catalogs that SkyPilot itself had fetched, and no account."""
    home = tmp_path_factory.mktemp("user")
    catalogs = home / ".sky" / "catalogs"
    shutil.copytree(CATALOGS, catalogs)
    for cloud, text in (("gcp", GCP), ("lambda", LAMBDA)):
        (catalogs / "v8" / cloud).mkdir()
        (catalogs / "v8" / cloud / "vms.csv").write_text(text)
    for file in list(catalogs.rglob("*.csv")):
        stamp = catalogs / "v8" / ".meta" / file.relative_to(catalogs / "v8")
        stamp.parent.mkdir(parents=True, exist_ok=True)
        digest = subprocess.run(["md5sum", file], capture_output=True, text=True, check=True).stdout.split()[
            0
        ]
        Path(f"{stamp}.md5").write_text(digest)
        os.utime(file, (time.time() - 30 * 86400,) * 2)
    return home


Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def ask(user_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """One SkyPilot for many questions, in a home as `prices.py` makes it."""
    home = SkyHome(tmp_path_factory.mktemp("prices"), [], "00000000")
    without = shutil.ignore_patterns(".meta")
    shutil.copytree(user_home / ".sky" / "catalogs", home.folder / ".sky" / "catalogs", ignore=without)
    sky = SkyProcess(home, home.folder / "skypilot.log")

    def ask(gpu: str, count: int, *infra: str) -> dict[str, Any]:
        found = sky.call("offers", 90.0, gpu=gpu, count=count, infra=list(infra))
        assert len(home.processes()) == 1, "no API server, no other process"
        return found

    yield ask
    sky.end()


def _seen(found: dict[str, Any]) -> list[tuple[str, str | None, float]]:
    return [(offer["infra"], offer["instance_type"], offer["price_per_hour"]) for offer in found["offers"]]


@pytest.mark.slow
def test_offers_are_those_of_the_catalog_the_cheapest_first(ask: Ask) -> None:
    found = ask("h100", 4, "aws")
    east, west = ("aws/us-east-1", "p5.24xlarge", 27.52), ("aws/us-west-2", "p5.24xlarge", 29.10)
    assert _seen(found) == [east, west]
    assert {offer["gpu"] for offer in found["offers"]} == {"H100"}
    assert found["types"] == {"H100": [4]}
    assert found["without_prices"] == []
    assert time.time() - found["as_of"] > 29 * 86400
    assert _seen(ask("H100", 4, "aws/us-west-2", "aws")) == [east, west]
    assert _seen(ask("H100", 4, "aws/US-WEST-2/us-west-2a")) == [("aws/us-west-2/us-west-2a", *west[1:])]


@pytest.mark.slow
def test_what_a_cloud_has_not_is_not_offered(ask: Ask) -> None:
    assert _seen(ask("H100", 8, "aws")) == []
    assert _seen(ask("H10", 4, "aws")) == []
    assert _seen(ask("H100", 4, "aws/eu-west-1")) == []
    found = ask("A100", 4, "azure")
    assert (found["offers"], found["types"], found["without_prices"]) == ([], {}, ["azure"])
    assert found["elsewhere"] == ["aws"]


@pytest.mark.slow
def test_prices_are_whole_and_what_has_none_is_left_out(ask: Ask) -> None:
    lambda_, gcp = ("lambda/us-east-1", "gpu_4x_a100", 5.16), ("gcp/us-central1", "a2-highgpu-4g", 14.5)
    assert _seen(ask("A100", 4, "gcp", "lambda")) == [lambda_, gcp]
    assert _seen(ask("A100", 8, "lambda")) == []


@pytest.mark.slow
def test_a_cluster_of_ones_own_is_offered_without_a_price_and_without_being_asked(ask: Ask) -> None:
    assert _seen(ask("B300", 2, "kubernetes/a/context", "slurm")) == [
        ("kubernetes/a/context", None, 0.0),
        ("slurm", None, 0.0),
    ]


@pytest.mark.slow
def test_old_prices_are_not_renewed_behind_ones_back(
    user_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SkyPilot would fetch newer ones; whoever asked for a connection would ask this proxy."""
    with socket.socket() as proxy:
        proxy.bind(("127.0.0.1", 0))
        proxy.listen()
        proxy.settimeout(0.01)
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        found = prices.market("A100", 4, ("gcp", "aws", "azure"), user_home)
        with pytest.raises(TimeoutError):
            proxy.accept()
    assert [offer.infra for offer in found.offers] == ["gcp/us-central1"]
    assert found.without_prices == ("azure",)


@pytest.mark.slow
def test_prices_are_fetched_where_that_is_asked_for_and_kept_where_skypilot_keeps_them(
    tmp_path: Path,
) -> None:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(CATALOGS))
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    fetched, user_home = tmp_path / "fetched", tmp_path / "user"
    done = subprocess.run(
        [sys.executable, PROGRAMS / "unit" / "fetch_catalogs.py", f"http://127.0.0.1:{web.server_port}"],
        env={"HOME": str(fetched), "PATH": os.environ["PATH"], "NO_PROXY": "*"},
        capture_output=True,
        text=True,
    )
    web.shutdown()
    web.server_close()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"fetched": ["aws/vms.csv"]}

    kept = user_home / ".sky" / "catalogs"
    assert sky_cache.save_catalogs(fetched / ".sky" / "catalogs", kept) == []
    assert prices.market("H100", 4, ("aws",), user_home).offers[0].price_per_hour == 27.52
    # What SkyPilot had fetched is replaced, what the user has changed is not.
    assert sky_cache.save_catalogs(fetched / ".sky" / "catalogs", kept) == []
    own = kept / "v8" / "aws" / "vms.csv"
    own.write_text(own.read_text().replace("27.52", "20.00"))
    assert sky_cache.save_catalogs(fetched / ".sky" / "catalogs", kept) == [str(own)]
    assert "20.00" in own.read_text()


@pytest.mark.slow
def test_prices_that_cannot_be_fetched_are_said_and_change_nothing(
    user_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        before = {path: path.stat().st_mtime_ns for path in user_home.rglob("*")}
        with pytest.raises(PreflightError) as refused:
            prices.refresh(("aws/us-east-1",), user_home)
    assert refused.value.message == "the prices of aws cannot be fetched"
    assert "onnect" in (refused.value.why or "") or "roxy" in (refused.value.why or "")
    assert {path: path.stat().st_mtime_ns for path in user_home.rglob("*")} == before
    assert prices.refresh(("kubernetes",), user_home) == ()


def test_without_skypilot_it_is_said_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is missing, a folder of that name on the path imports as an empty package."""
    home = SkyHome(tmp_path, [], "00000000")
    (tmp_path / "sky").mkdir()
    (tmp_path / "sky" / "__init__.py").touch()
    monkeypatch.setattr(sys, "executable", str(python_with(tmp_path / "python", tmp_path)))
    sky = SkyProcess(home, tmp_path / "skypilot.log")
    with pytest.raises(PreflightError, match="SkyPilot is not installed") as refused:
        sky.call("offers", 90.0, gpu="H100", count=4, infra=["aws"])
    sky.end()
    assert refused.value.hint == "pip install 'slipway-rl[cloud]'"


def test_without_a_place_it_is_every_cloud_with_an_account(tmp_path: Path) -> None:
    for name in (".aws", ".kube", ".ssh", ".lambda_cloud"):
        (tmp_path / name).mkdir()
    assert prices.places((), tmp_path, {}) == ("aws", "lambda")
    assert prices.places((), tmp_path, {"RUNPOD_API_KEY": "x"}) == ("aws", "lambda", "runpod")
    assert prices.places(("slurm",), tmp_path, {}) == ("slurm",)
    with pytest.raises(PreflightError, match="no cloud account") as refused:
        prices.places((), tmp_path / "other", {})
    assert "--infra aws" in (refused.value.hint or "")


@pytest.mark.slow
def test_g26_a_rented_run_is_planned_and_priced_without_a_network(user_home: Path, tmp_path: Path) -> None:
    words = ["plan", "--gpus", "H100:4", "--infra", "aws", "--max", "1h", "--json", "--", "python", "x.py"]
    environ = {"HOME": str(user_home), "LAUNCH_HOME": str(tmp_path / "home"), "PATH": os.environ["PATH"]}
    program = PROGRAMS / "unit" / "launch_on_loopback.py"
    done = subprocess.run(
        ["unshare", "--net", "--map-root-user", sys.executable, program, *words],
        env=environ,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    plan = json.loads(line)
    assert plan["schema"] == 1
    assert plan["where"] == "4×H100 on aws/us-east-1"
    assert plan["cost_at_most"] == pytest.approx(29.10 * (3600 + 900 + 600 + 90) / 3600)
    assert plan["rented"].pop("model_bytes") > 0
    assert plan["rented"].pop("memory")["short"] is None
    assert plan["rented"].pop("without_memory") is None
    assert plan["rented"] == {
        "gpus": "H100:4", "infra": ["aws"], "idle_minutes": 10, "disk_gb": 100,
        "train_gpus": 1, "infer_gpus": 3, "max_price_per_hour": 29.10,
        "dtype": "bfloat16",
    }  # fmt: skip
    assert [offer["price_per_hour"] for offer in plan["candidates"]] == [27.52, 29.10]
    assert "30 days old" in done.stderr
    assert not (tmp_path / "home").exists(), "nothing is kept"
