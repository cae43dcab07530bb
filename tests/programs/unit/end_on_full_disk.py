"""Ends a cluster whose run's home is on a full disk: `end_on_full_disk.py SMALL FOLDER`; says how, as JSON.

SMALL is a small file system, FOLDER is on another one. In SkyPilot's place is `answer_sky_calls.py`; its API
server does not start.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from launcher.backends.skypilot.cluster_request import ClusterRequest
from launcher.backends.skypilot.cluster_teardown import ClusterTeardown
from launcher.backends.skypilot.sky_home import SkyHome
from launcher.backends.skypilot.sky_process import SkyProcess

STANDING = {
    "provider": {"name": "AWS", "cluster": "slip-0123abcd", "cluster_on_cloud": "slip-0123abcd-0123abcd",
                 "config": {"region": "us-east-1"}},
    "where": "aws/us-east-1", "instance_type": "p5.48xlarge", "price_per_hour": 27.52, "address": "10.0.0.1",
    "ssh": None,
}  # fmt: skip


def main(small: Path, folder: Path) -> None:
    provider = folder / "provider"
    provider.mkdir()
    (provider / "i-0123").touch()
    user = folder / "user"
    (user / ".aws").mkdir(parents=True)
    (user / ".aws" / "credentials").write_text("[default]\n")
    os.environ["HOME"] = str(user)
    sys.executable = str(_python(folder, provider))
    home = SkyHome(small / "run" / "skypilot", ["aws/us-east-1"], "0123abcd")
    home.make()
    home.port()
    (home.folder / "books.json").write_text(json.dumps(STANDING))
    log = small / "run" / "skypilot.log"
    log.touch()
    sky = SkyProcess(home, log)

    def keep(standing: object) -> None:
        (small / "run" / "record.json").write_text(json.dumps(standing) * 100)

    with (small / "filling").open("wb", buffering=0) as filling:
        try:
            while True:
                filling.write(bytes(4096))
        except OSError:
            pass
    before = set(Path("/dev/shm").iterdir())
    order = ClusterRequest("slip-0123abcd", ["aws/us-east-1"], "H100:4")
    teardown = ClusterTeardown(order, lambda: order.infra, home, sky, keep)
    teardown.down(STANDING | {"address": None} if os.environ.get("CHANGED") else STANDING)
    left = sorted(os.listdir(provider))
    proof = teardown.proof(STANDING)
    spare = [str(path) for path in set(Path("/dev/shm").iterdir()) - before if "slipway" in path.name]
    print(json.dumps({"left": left, "proof": proof.to_dict(), "spare": spare, "home": home.folder.exists()}))


def _python(folder: Path, provider: Path) -> Path:
    """What is started in the place of this Python."""
    stands_in = Path(__file__).with_name("answer_sky_calls.py")
    script = folder / "python"
    script.write_text(
        "#!/bin/sh\n"
        'case "$3" in launcher.backends.skypilot.sky_calls) '
        f"exec {sys.executable} {stands_in} {provider};; esac\n"
        "exit 1\n"
    )
    script.chmod(0o700)
    return script


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
