"""What this computer lacks, has too little of or cannot do is refused with 3: a port, disk, Linux, ssh."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from launcher.base import disk
from launcher.base.home import Home
from launcher.cli.main import unsupported
from launcher.config import preflight
from launcher.records.records import RecordStore
from tests.support.refusals import Place, Refused, check, place

__all__ = ["place"]

pytestmark = pytest.mark.process


def test_g31_a_taken_port_is_3_and_says_who_holds_it_without_asking_for_everybodys_connections(
    place: Place,
) -> None:
    """Which takes root on a Mac."""

    def as_on_a_mac(*_kind: str) -> list[object]:
        raise psutil.AccessDenied

    place.patch.setattr(psutil, "net_connections", as_on_a_mac)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        holder = f"(pid {os.getpid()}) uses it"
        check(Refused(f"--port {port}", 3, f"port {port} is taken", holder, "leave out --port"), place)
        place.live_run("dev")
        store = RecordStore(Home.find({"LAUNCH_HOME": str(place.home)}))
        store.update(store.load("dev").id, url=f"http://127.0.0.1:{port}")
        check(Refused(f"--port {port}", 3, "is taken", "the run dev uses it", "leave out --port"), place)


def test_a_disk_too_full_for_the_environment_is_3(place: Place) -> None:
    place.patch.setattr(disk, "free_bytes", lambda folder: 3 * 10**9)
    check(
        Refused("up", 3, "the runtime's environment needs 8.0 GB of disk", "3.0 GB are free", "LAUNCH_HOME"),
        place,
    )


def test_a_disk_too_full_for_the_checkpoints_is_3(place: Place) -> None:
    """Checkpoints of the chosen rank, times those that are kept."""
    place.patch.setattr(disk, "free_bytes", lambda folder: 10**9)
    small = Refused("--set train.lora.rank=8", 3, "environment needs", "1.0 GB are free", "free some space")
    check(small, place)
    typed = "--set train.lora.rank=256 --set train.keep_checkpoints=30"
    check(Refused(typed, 3, "a run with 30 checkpoints needs 1.", "1.0 GB are free", "LAUNCH_HOME"), place)


def test_the_size_of_a_checkpoint_is_that_of_a_real_one() -> None:
    """A rank-16 step of Qwen2.5-0.5B: 8.8 M adapter weights, each with two moments, in float32."""
    from launcher.models.model_folder import checkpoint_bytes
    from runtime.shared.model_shape import shape

    found = shape(
        {
            "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2,
            "intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151936,
        }
    )  # fmt: skip
    assert found is not None
    assert checkpoint_bytes(found, 16) == 8_798_208 * 12


def test_no_network_is_3_while_the_environment_is_not_built(place: Place, tmp_path: Path) -> None:
    place.patch.undo()
    place.patch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen: a connection is refused at once
        for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL"):
            place.patch.setenv(name, f"http://127.0.0.1:{nobody.getsockname()[1]}/simple")
        for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS", "UV_INDEX", "UV_EXTRA_INDEX_URL"):
            place.patch.delenv(name, raising=False)
        place.patch.setenv("UV_NO_CONFIG", "1")
        what = "the runtime's environment is not built, and its packages cannot be downloaded"
        check(Refused("up", 3, what, "fetch", "once the environment is built, launch works offline"), place)


@pytest.mark.parametrize(
    ("tools", "missing"), [(("ssh",), "rsync is"), (("rsync",), "ssh is"), ((), "ssh and rsync are")]
)
def test_g11_without_the_programs_that_reach_a_machine_nothing_is_rented(
    tools: tuple[str, ...], missing: str, place: Place, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    for tool in ("true", *tools):
        (tmp_path / "bin" / tool).symlink_to("/bin/true")
    typed = "--gpus H100:4 --infra aws --yes -- true"
    what, why = "launch reaches a rented machine with ssh and rsync", f"{missing} not on this computer"
    check(Refused(typed, 3, what, why, "apt-get install", environ={"PATH": str(tmp_path / "bin")}), place)


@pytest.mark.parametrize(
    ("python", "platform", "what", "hint"),
    [
        (
            (3, 10),
            "linux",
            "launch needs Python 3.11 or newer, this is 3.10",
            "uv tool install --python 3.12",
        ),
        ((3, 12), "win32", "launch does not run on Windows", "wsl --install"),
    ],
)
def test_a_computer_that_cannot_run_launch_is_told(python, platform, what: str, hint: str) -> None:
    refusal = unsupported(python, platform)
    assert refusal is not None and refusal.exit_code == 3
    assert refusal.message == what
    assert hint in (refusal.hint or "")
    assert unsupported((3, 11), "linux") is None and unsupported((3, 14), "darwin") is None


def test_an_old_python_gets_as_far_as_the_refusal() -> None:
    """What is imported before it must be readable for Pythons before 3.11."""
    import ast

    import launcher.base.errors
    import launcher.cli.main

    for module in (launcher, launcher.cli, launcher.cli.main, launcher.base, launcher.base.errors):
        ast.parse(Path(str(module.__file__)).read_text(), feature_version=(3, 8))


def test_a_run_here_needs_linux_and_the_verbs_do_not(place: Place) -> None:
    place.patch.setattr(sys, "platform", "darwin")
    check(Refused("up", 3, "needs Linux, this is macOS", "needs a Linux feature", "container"), place)
    assert place.typed("status").returncode == 0


def test_a_long_home_is_fine_because_sockets_lie_elsewhere(place: Place) -> None:
    from launcher.backends.local_machine import LocalMachine

    home = Home.find({"LAUNCH_HOME": str(place.home / ("long" * 30))})
    preflight.check_folders(home)
    machine = LocalMachine("slip-01234567", home.run_folder("slip-01234567") / "machine", home.environments)
    assert len(f"{machine.socket_dir}/engine-00.sock") < 104


def test_a_folder_that_is_gone_is_said(place: Place) -> None:
    gone = place.folder / "gone"
    gone.mkdir()
    done = subprocess.run(
        ["sh", "-c", f"rmdir {gone}; exec {sys.executable} -m launcher.cli.main -- true"],
        cwd=gone,
        env={
            **os.environ,
            "LAUNCH_HOME": str(place.home),
            "PYTHONPATH": str(Path(preflight.__file__).parents[2]),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert done.stderr.splitlines()[0] == "Error: this folder is gone"
