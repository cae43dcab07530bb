"""One whole rented run with secrets about: they reach who needs them, on either side, and stand nowhere else.

Neighbours: `canary.py` looks, `tests/e2e/test_secrets.py` asks the same of a run on this computer.
"""

from __future__ import annotations

import json
import secrets
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from runtime import metadata_shield
from tests.cloud import listening
from tests.cloud.canary import LAPTOP, LOOKS_PER_SECOND, MACHINE, Watch, files_holding, side_of, written
from tests.cloud.entered import enter_the_machine, home_and_gone, skypilots_server_rests
from tests.cloud.launched import RENTED, Launched, left
from tests.cloud.rig import ENDPOINT, REPOSITORY, Rig, missing, rig_in
from tests.cloud.runtime_image import runtime_binds
from tests.support.environment import PROGRAMS
from tests.support.waiting import wait_until
from tests.support.wandb_files import story_at_home

pytestmark = pytest.mark.slow

# Of this test alone: what looks for them may see other rigs of this computer.
ALIKE = f"canary+/{secrets.token_hex(8)}-of"
HF, WANDB = f"hf_{ALIKE}-the-hub", f"{ALIKE}-the-board"
# Another service's keys: one beside ours in .env, one in the user's shell.
FILE, SHELL = f"{ALIKE}-another-service", f"{ALIKE}-the-shell"
# Credentials of clouds: what pays here, and others in the user's home and shell.
AWS, OTHERS, AZURE = f"{ALIKE}-aws", f"{ALIKE}-other-clouds", f"{ALIKE}-azures-shell"
SSH = f"{ALIKE}-the-users-ssh"
EVERY = (HF, WANDB, FILE, SHELL, AWS, OTHERS, AZURE, SSH)
ENV_FILE = "project.env"
OTHER_CLOUDS = (".config/gcloud/key.json", ".azure/token", ".lambda_cloud/lambda_keys", ".runpod/config.toml")
# What the user configured for SkyPilot: a part of it holds, the rest is said.
CONFIG = (
    "{api_server: {endpoint: 'http://127.0.0.1:9'},"
    " aws: {labels: {lab: of-ours}, remote_identity: LOCAL_CREDENTIALS}}"
)

PROGRAM = PROGRAMS / "e2e" / "train_and_wait.py"


@dataclass
class Process:
    """One process of the rig, as it was looked at while the run lived."""

    side: str | None
    line: str
    group: int
    no_new_privileges: bool
    addresses: set[listening.Address]
    # Each Unix socket that listens under the name it was made with: its own mode and its folder's.
    sockets: dict[str, tuple[int, int]]


@dataclass
class Seen:
    """What was seen of the run while it lived and after."""

    rig: Rig
    launched: Launched
    token: str = ""
    code: int | None = None
    watch: Watch = field(default_factory=Watch)
    processes: list[Process] = field(default_factory=list)
    # Files that held a canary: on the machine, on the laptop beside it, on the laptop afterwards.
    on_machine: list[Path] = field(default_factory=list)
    beside: list[Path] = field(default_factory=list)
    afterwards: list[Path] = field(default_factory=list)
    files_on_machine: list[str] = field(default_factory=list)
    # The links in SkyPilot's private home, and the sockets in the runtime's folder: their modes and its.
    linked: dict[str, Path] = field(default_factory=dict)
    doors: dict[str, tuple[int, int]] = field(default_factory=dict)
    # Group of processes → whether the metadata service answers it.
    metadata: dict[int, bool] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def runtime(self) -> list[Process]:
        """The runtime's processes on the machine."""
        keepers = {one.group for one in self.processes if "-m runtime.keeper" in one.line}
        assert len(keepers) == 1
        return [one for one in self.processes if one.side == MACHINE and one.group in keepers]


def _furnish(rig: Rig) -> set[Path]:
    """A user's home with accounts everywhere and a project's `.env`: the user's own files with secrets."""
    (rig.home / ".sky" / "config.yaml").write_text(CONFIG)
    key = f"[default]\naws_access_key_id = testing\naws_secret_access_key = {AWS}\n"
    contents = {".aws/credentials": key, ".ssh/id_ed25519": SSH, **dict.fromkeys(OTHER_CLOUDS, OTHERS)}
    contents[ENV_FILE] = f"HF_TOKEN={HF}\nWANDB_API_KEY={WANDB}\nOTHER_API_KEY={FILE}\n"
    for name, content in contents.items():
        (rig.home / name).parent.mkdir(parents=True, exist_ok=True)
        (rig.home / name).write_text(content)
        (rig.home / name).chmod(0o600)
    return {rig.home / name for name in contents}


@pytest.fixture(scope="module")
def seen() -> Iterator[Seen]:
    if (why := missing()) is not None:
        pytest.skip(why)
    scratch = Path("/var/tmp") / f"slipway-rig-{secrets.token_hex(4)}"
    with rig_in(scratch, runtime_binds()) as rig:
        own = _furnish(rig)
        begun = time.time()
        there_before = _shared_folders()
        words = [*RENTED, "--debug", "--env-file", str(rig.home / ENV_FILE), "--wandb", "offline"]
        watch = Watch()
        with watch:
            launched = Launched(
                rig,
                [*words, "--", sys.executable, str(PROGRAM), "SHELL_API_KEY", "AZURE_CLIENT_SECRET"],
                PYTHONPATH=str(REPOSITORY),
                SHELL_API_KEY=SHELL,
                AZURE_CLIENT_SECRET=AZURE,
            )
            found = Seen(rig, launched, watch=watch)
            launched.wait_for("ready: http", 900)
            results = launched.run / "results"
            wait_until(
                lambda: (results / "trained").exists() or launched.process.poll() is not None,
                300,
                lambda: f"two steps\n{launched.text}",
            )
            found.token = (launched.run / "token").read_text().strip()
            _look_at_the_living(found, begun, own | {launched.run / "token"})
            skypilots_server_rests(rig)
            enter_the_machine(rig, launched)
            (results / "looked-at").touch()
            found.code = launched.wait(600)
        new = [path for name in _shared_folders() - there_before for path in written(name, begun)]
        files = {*written(rig.folder, begun), *new} - own
        found.afterwards = files_holding(files, (*EVERY, found.token))
        yield found


def _shared_folders() -> set[Path]:
    """What stands where everybody may write."""
    return {path for folder in ("/tmp", "/var/tmp") for path in Path(folder).iterdir()}


def _look_at_the_living(found: Seen, begun: float, own: set[Path]) -> None:
    rig = found.rig
    listed = rig.processes()
    (machine,) = [pid for pid, line in listed.items() if "inside/reaper.py" in line]
    found.processes = [one for pid in listed if (one := _process(pid)) is not None]
    skypilot = found.launched.run / "skypilot"
    found.linked = {path.name: path.readlink() for path in skypilot.rglob("*") if path.is_symlink()}
    # The key of SkyPilot's clusters: any line of its body is the key.
    keys = [path.read_text().splitlines()[1] for path in skypilot.rglob("sky-key")]
    assert keys
    there = Path(f"/proc/{machine}/root")
    sockets = there / "tmp" / found.launched.run.name
    found.doors = {
        path.name: (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(sockets.stat().st_mode))
        for path in sockets.iterdir()
        if path.is_socket()
    }
    files = written(there, begun)
    found.files_on_machine = [str(path.relative_to(there)) for path in files]
    found.on_machine = files_holding(files, (*EVERY, found.token, *keys))
    found.beside = files_holding(set(written(rig.folder, begun)) - own, (*EVERY, found.token))
    for group in {one.group for one in found.processes if one.side == MACHINE and one.group}:
        found.metadata[group] = _metadata_answers(machine, group)
    found.labels = _labels(rig)


def _process(pid: int) -> Process | None:
    try:
        said = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in said if ":\t" in line)
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        sockets = listening.unix_sockets(pid)
        modes = {
            str(path).partition("/root")[2]: (path.stat().st_mode, path.parent.stat().st_mode)
            for path in sockets
            if path.exists()
        }
        group, shut = int(status["Gid"].split()[1]), status["NoNewPrivs"] == "1"
        return Process(side_of(pid), line, group, shut, listening.addresses(pid), modes)
    except OSError:  # it has ended meanwhile
        return None


def _metadata_answers(machine: int, group: int) -> bool:
    """Whether the machine's metadata service answers who is in a group there, as the runtime's user."""
    who = [f"--target={machine}", "--net", "--mount", f"--setgid={group}", "--setuid=21000"]
    ask = "import socket; socket.create_connection(('169.254.169.254', 80), 5)"
    done = subprocess.run(["nsenter", *who, "python3.11", "-S", "-c", ask], capture_output=True, text=True)
    assert done.returncode == 0 or "refused" in done.stderr, done.stderr
    return done.returncode == 0


def _labels(rig: Rig) -> dict[str, str]:
    """What the provider has as the machine's tags."""
    return json.loads(rig.run_program("machine_tags.py", ENDPOINT))


def test_a_rented_run_is_entered_trains_comes_home_and_leaves_nothing(seen: Seen) -> None:
    print(seen.launched.text)
    assert seen.code == 0
    home_and_gone(seen.rig, seen.launched, steps=2)


def test_the_users_own_configuration_held(seen: Seen) -> None:
    assert seen.labels["lab"] == "of-ours"
    for left_out in ("api_server is ignored", "aws.remote_identity is ignored"):
        assert left_out in seen.launched.text
    wait_until(lambda: not left(seen.rig, str(PROGRAM)))


def test_s01_wandbs_offline_file_is_home_with_every_step_every_validation_and_the_end(seen: Seen) -> None:
    story = story_at_home(seen.launched.run / "results")
    print(story)
    assert (story["steps"], story["validations"], story["ended"]) == ([1, 2], [0, 1, 2], True)


def test_g14_no_secret_was_ever_in_a_command_line_on_either_side(seen: Seen) -> None:
    watch = seen.watch
    print(f"{watch.looks} looks, {watch.late} of them late; {len(watch.seen)} programs")
    assert watch.looks > 20 * LOOKS_PER_SECOND
    assert {"launcher.teardown.guardian", "launcher.backends.skypilot.sky_calls", "ssh"} <= watch.names(
        LAPTOP
    )
    assert {"runtime.keeper", "runtime.gateway.gateway", "runtime.metadata_shield"} <= watch.names(MACHINE)
    assert watch.command_lines([*EVERY, seen.token]) == []


def test_g14_each_process_has_the_secrets_it_needs_and_no_other(seen: Seen) -> None:
    watch = seen.watch
    # What these start inherits from them: vLLM a shell, the trainer wandb's own processes.
    parts = {
        canary: {one for one in watch.holders([canary], MACHINE) if one.startswith("runtime")}
        for canary in (HF, WANDB)
    }
    trainer = {"runtime.keeper", "runtime", "runtime.recipes.tune"}
    assert parts == {HF: {*trainer, "runtime.engine.server"}, WANDB: trainer}
    assert "runtime.gateway.gateway" in watch.names(MACHINE)
    assert watch.holders([SHELL, FILE, AWS, OTHERS, AZURE, SSH, seen.token], MACHINE) == set()
    assert watch.holders([HF, WANDB, FILE, AWS, OTHERS, SSH], LAPTOP) == set()


def test_g14_no_secret_is_in_any_file_on_either_side(seen: Seen) -> None:
    assert "home/ubuntu/slipway/" in " ".join(seen.files_on_machine), "the run's own files were looked at"
    assert (seen.on_machine, seen.beside, seen.afterwards) == ([], [], [])


def test_g16_nothing_of_the_users_keys_is_on_the_machine_and_skypilot_sees_the_target_clouds_only(
    seen: Seen,
) -> None:
    homes = [name for name in seen.files_on_machine if name.startswith("home/")]
    places = (".aws/", ".config/gcloud", ".azure", ".lambda_cloud", ".runpod", "sky-key", "id_ed25519")
    assert [name for name in homes if any(place in name for place in places)] == []
    assert seen.linked == {".aws": seen.rig.home / ".aws"}
    assert not {name for name in seen.watch.holders([SHELL, AZURE], LAPTOP) if "sky" in name.lower()}


def test_g12_what_is_ours_listens_on_loopback_and_in_folders_of_its_own_only(seen: Seen) -> None:
    ours = [one for one in seen.processes if one.side == LAPTOP and "tests.cloud.provider" not in one.line]
    listeners = [one for one in (*ours, *seen.runtime) if one.addresses or one.sockets]
    for one in listeners:
        print(
            one.side, one.line[:60], *one.addresses, {k: [oct(m) for m in v] for k, v in one.sockets.items()}
        )
    assert {one.side for one in listeners} == {LAPTOP, MACHINE}
    assert all(address.is_loopback for one in listeners for address in one.addresses)
    assert seen.doors == {"gateway.sock": (0o600, 0o700), "engine-0.sock": (0o600, 0o700)}
    # What libraries open besides: nobody else may connect, by the socket's own mode or its folder's.
    for one in listeners:
        for path, (mode, folder) in one.sockets.items():
            assert mode & 0o077 == 0 or folder & 0o077 == 0, path


def test_g16_the_metadata_service_refuses_the_runtime_and_still_answers_skylet(seen: Seen) -> None:
    (group,) = {one.group for one in seen.runtime}
    assert all(one.no_new_privileges for one in seen.runtime)
    for part in ("runtime.gateway.gateway", "runtime.engine.server", "grpo_lora"):
        assert any(part in one.line for one in seen.runtime), part
    (skylet,) = {one.group for one in seen.processes if "sky.skylet.skylet" in one.line}
    assert seen.metadata[group] is False
    assert seen.metadata[skylet] is True
    assert metadata_shield.REACHABLE not in seen.launched.text
