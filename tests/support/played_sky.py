"""SkyPilot's own code for GCP, Lambda and RunPod, with its providers played at the HTTP boundary.

One process that has imported the pinned SkyPilot (`tests/programs/unit/launch_without_server.py`), in a home
as runs have it, behind the proxy that is the providers. Neighbours: `played_https.py` is that proxy.
Not here: any account, ssh, SkyPilot's API server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from launcher.backends.skypilot import sky_process
from launcher.backends.skypilot.cluster_request import ClusterRequest
from launcher.backends.skypilot.provider_listings import ProviderListings
from launcher.backends.skypilot.sky_home import SkyHome
from launcher.backends.skypilot.sky_process import SkyProcess
from launcher.backends.skypilot.task_file import task_file
from launcher.base.processes import ProcessId
from tests.support import played_gcp
from tests.support.environment import PROGRAMS
from tests.support.played_gcp import PlayedGcp
from tests.support.played_https import Played, Proxy
from tests.support.played_lambda import PlayedLambda
from tests.support.played_runpod import PlayedRunPod

USER_ID = "0123abcd"
# Wide: importing SkyPilot, and Google's description of its API, takes long on a busy computer.
ASK_SECONDS, LAUNCH_SECONDS = 300.0, 600.0
_PROGRAM = PROGRAMS / "unit" / "launch_without_server.py"
_GPUS = "\"{'Gpus': [{'Name': 'H100', 'MemoryInfo': {'SizeInMiB': 81920}}]}\""
CATALOGS = {
    "gcp/vms.csv": f"""\
InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,AvailabilityZone,Price,SpotPrice
,,,H100,1.0,{_GPUS},us-central1,us-central1-a,8.0,3.0
,,,H100,1.0,{_GPUS},us-central1,us-central1-b,8.0,3.0
a3-highgpu-1g,26.0,234.0,,,,us-central1,us-central1-a,3.0,1.0
a3-highgpu-1g,26.0,234.0,,,,us-central1,us-central1-b,3.0,1.0
""",
    "gcp/images.csv": """\
Tag,Region,OS,OSVersion,ImageId,CreationDate
skypilot:custom-gpu-ubuntu-2204-cuda13,,ubuntu,22.04,projects/played/global/images/gpu,20260101
""",
    "gcp/accelerator_quota_mapping.csv": "Accelerator,QuotaName,Spot Quota Name\n",
    "common/accelerators.csv": "AcceleratorName,Clouds\nH100,\"['GCP', 'Lambda', 'RunPod']\"\n",
    "lambda/vms.csv": f"""\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice
gpu_1x_h100,H100,1.0,26.0,200.0,2.49,us-east-1,{_GPUS},
gpu_1x_h100,H100,1.0,26.0,200.0,2.49,us-west-1,{_GPUS},
""",
    "runpod/vms.csv": f"""\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Region,SpotPrice,Price,AvailabilityZone
1x_H100_SECURE,H100,1.0,16.0,188.0,{_GPUS},CA,1.25,2.39,CA-MTL-1
1x_H100_SECURE,H100,1.0,16.0,188.0,{_GPUS},US,1.25,2.39,US-KS-2
""",
}


class PlayedHome(SkyHome):
    """A run's home whose SkyPilot has no API server and talks to the played providers."""

    proxy: Proxy

    def environ(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        bin_folder = self.proxy.ca.parent / "bin"
        path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
        user = dict(os.environ if environ is None else environ)
        return super().environ(user | {"PATH": path}) | self.proxy.environ()

    def serve(self, bound_seconds: float = 0.0, spared: Set[ProcessId] = frozenset()) -> None:
        """There is none."""

    def healthy(self) -> bool:
        return True


class PlayedProcess(SkyProcess):
    """The real one but for its program."""

    def _running(self) -> subprocess.Popen[str]:
        def start(command: list[str], **named: Any) -> subprocess.Popen[str]:
            assert command[1:] == ["-P", "-m", "launcher.backends.skypilot.sky_calls"]
            return subprocess.Popen([sys.executable, str(_PROGRAM)], **named)

        real = sky_process.subprocess
        sky_process.subprocess = type("Started", (), {"Popen": staticmethod(start), "PIPE": real.PIPE})
        try:
            return super()._running()
        finally:
            sky_process.subprocess = real


def furnish(user_home: Path) -> None:
    """A user's home: an account with each of the clouds, and catalogs that are never fetched again."""
    files = {
        ".lambda_cloud/lambda_keys": "api_key = played\n",
        ".runpod/config.toml": '[default]\napi_key = "played"\n',
        ".config/gcloud/application_default_credentials.json": json.dumps(played_gcp.CREDENTIALS),
        ".config/gcloud/access_tokens.db": "",
        ".config/gcloud/credentials.db": "",
    } | {f".sky/catalogs/v8/{name}": text for name, text in CATALOGS.items()}
    for name, text in files.items():
        (user_home / name).parent.mkdir(parents=True, exist_ok=True)
        (user_home / name).write_text(text)


class KeptHome(PlayedHome):
    """One that outlives its runs, as the process in it does."""

    def end_server(self, spared: Set[ProcessId] = frozenset(), grace_seconds: float = 0.0) -> None:
        """There is none."""

    def remove(self) -> None:
        """It stays."""


class KeptProcess(PlayedProcess):
    """One that outlives its runs: importing SkyPilot takes seconds."""

    def end(self) -> None:
        """It stays, but for one that is busy with what nobody waits for."""
        if self._process is not None and self._one_at_a_time.locked():
            super().end()

    def close(self) -> None:
        """Now."""
        super().end()


class PlayedSky:
    """The providers, and a SkyPilot that knows only them. `close` it."""

    def __init__(self, folder: Path) -> None:
        self.gcp, self.lambda_, self.runpod = PlayedGcp(), PlayedLambda(), PlayedRunPod()
        self.played: dict[str, Played] = {"gcp": self.gcp, "lambda": self.lambda_, "runpod": self.runpod}
        (folder / "bin").mkdir()
        (folder / "bin" / "gcloud").write_text(played_gcp.GCLOUD)
        (folder / "bin" / "gcloud").chmod(0o755)
        self.proxy = Proxy(folder, list(self.played.values()))
        self.user_home = folder / "user"
        furnish(self.user_home)
        self.home = KeptHome(folder / "sky", list(self.played), USER_ID)
        self.home.proxy = self.proxy
        self.home.make(self.user_home)
        self.sky = KeptProcess(self.home, folder / "skypilot.log")
        self._named = 0

    def home_in(self, folder: Path, infra: list[str]) -> PlayedHome:
        """A run's own home for these clouds, in the same world."""
        home = PlayedHome(folder, infra, USER_ID)
        home.proxy = self.proxy
        return home

    def new_cluster(self) -> str:
        """A run's id that was not there before; the providers are as new."""
        for one in self.played.values():
            one.forget()
        self.proxy.refused.clear()
        self._named += 1
        return f"slip-{self._named:08x}"

    def providers(self, cloud: str, cluster: str) -> list[dict[str, Any]]:
        """How a cloud is asked for a cluster that is on no books."""
        call = self.sky.call("candidates", ASK_SECONDS, cluster=cluster, gpus="H100:1", infra=[cloud])
        return call["providers"]

    def listed(self, cloud: str, cluster: str) -> list[str]:
        """What a teardown makes of a cloud's own list, where the cluster was tried. Raises LaunchError."""
        asked, order = self.providers(cloud, cluster), ClusterRequest(cluster, [cloud], "H100:1")
        said = ProviderListings(order, lambda: [cloud]).ask(self.sky, asked)
        return [one for _, some in said.complete() for one in some]

    def launch(self, cluster: str, *infra: str, **more: Any) -> dict[str, Any]:
        """`sky_calls.launch` as `provision.py` calls it, as far as there are machines."""
        order: dict[str, Any] = {
            "task_file": str(task_file("arm.yaml")), "cluster": cluster, "infra": list(infra),
            "gpus": "H100:1", "disk_gb": 200, "idle_minutes": 10, "max_price_per_hour": None,
            "labels": {"slipway-home": "0123"},
        }  # fmt: skip
        return self.sky.call("launch", LAUNCH_SECONDS, **(order | more))

    def close(self) -> None:
        """End SkyPilot and the providers."""
        self.sky.close()
        self.proxy.close()


def on_cloud(cluster: str) -> str:
    """The cluster's name at its provider."""
    return f"{cluster}-{USER_ID}"
