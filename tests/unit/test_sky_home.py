"""SkyPilot's private home: one cloud's credentials, its own port; and calls of SkyPilot that are bounded."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from launcher.backends.cloud_machine import CloudMachine
from launcher.backends.machine_from_record import from_record
from launcher.backends.skypilot import sky_process
from launcher.backends.skypilot.sky_home import SkyHome
from launcher.backends.skypilot.sky_process import (
    NoAccessError,
    SkyCallError,
    SkyCallTimeoutError,
    SkyProcess,
)
from launcher.base.errors import CapacityError, PreflightError
from launcher.records.records import RunRecord
from launcher.types.clouds import clouds_of
from launcher.types.machine import Machine
from tests.support.environment import PROGRAMS, REPOSITORY

FIVE = (".aws/credentials", ".config/gcloud/key.json", ".azure/token", ".lambda_cloud/keys", ".runpod/config")


@pytest.fixture
def user_home(tmp_path: Path) -> Path:
    home = tmp_path / "user"
    for name in (*FIVE, ".netrc", ".ssh/id_ed25519"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(f"secret of {name}")
    return home


def _is_a_machine(machine: CloudMachine) -> Machine:
    """For the type checker: it keeps the protocol."""
    return machine


def _home(tmp_path: Path, *infra: str) -> SkyHome:
    return SkyHome(tmp_path / "sky", list(infra), "0123abcd")


def test_g16_only_the_target_clouds_credentials_are_in_its_home(tmp_path: Path, user_home: Path) -> None:
    home = _home(tmp_path, "aws/us-east-1")
    home.make(user_home)
    assert stat.S_IMODE(home.folder.stat().st_mode) == 0o700
    assert (home.folder / ".aws/credentials").read_text() == "secret of .aws/credentials"
    seen = {str(path.relative_to(home.folder)) for path in home.folder.rglob("*")}
    assert seen <= {".aws", ".sky", ".sky/config.yaml", "api-port"}
    assert "NO_UPLOAD" in (home.folder / ".sky/config.yaml").read_text()


@pytest.mark.slow
def test_g16_while_it_launches_on_one_cloud_skypilot_would_upload_nothing_of_another(
    tmp_path: Path, user_home: Path
) -> None:
    """Its own upload list, asked of itself: with all clouds' credentials in sight the list is another one."""
    home = _home(tmp_path, "aws", "runpod", "lambda")
    ask = "from sky import check, clouds; print(list(check.get_cloud_credential_file_mounts([clouds.AWS()])))"

    def uploaded(only: str | None) -> str:
        home.make(user_home, only=only)
        done = subprocess.run(
            [sys.executable, "-c", ask], env=home.environ(), capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()[-1]

    (user_home / ".lambda_cloud" / "lambda_keys").write_text("api_key = secret")
    (user_home / ".runpod" / "config.toml").write_text("[default]")
    assert uploaded("aws") == "[]"
    assert "lambda" in uploaded(None)


_CONFIG = """
allowed_clouds: [gcp]
admin_policy: somebody.Policy
api_server: {endpoint: "http://user:canary-0123@sky.example"}
nvidia_gpus: {disable_ecc: true}
aws:
  vpc_name: of-the-lab
  use_internal_ips: true
  ssh_proxy_command: {us-east-1: ssh -i ~/.ssh/jump -W %h:%p me@jump~/x}
  labels: {owner: somebody}
  remote_identity: LOCAL_CREDENTIALS
gcp: {vpc_name: of-another-lab}
"""


def test_what_the_users_configuration_says_of_the_target_cloud_holds_and_the_rest_is_said(
    tmp_path: Path, user_home: Path
) -> None:
    (user_home / ".sky").mkdir()
    (user_home / ".sky/config.yaml").write_text(_CONFIG)
    home = _home(tmp_path, "aws")
    left_out = home.make(user_home)
    text = (home.folder / ".sky/config.yaml").read_text()
    assert json.loads(text) == {
        "allowed_clouds": ["aws"],
        "nvidia_gpus": {"disable_ecc": True},
        "aws": {
            "vpc_name": "of-the-lab",
            "use_internal_ips": True,
            "ssh_proxy_command": {"us-east-1": f"ssh -i {user_home}/.ssh/jump -W %h:%p me@jump~/x"},
            "labels": {"owner": "somebody"},
            "remote_identity": "NO_UPLOAD",
        },
    }
    for name in ("admin_policy", "api_server", "aws.remote_identity"):
        assert any(f"{name} is ignored" in line for line in left_out)
    assert len(left_out) == 3 and not any("canary" in line for line in left_out)


def test_p18_a_central_api_server_of_the_environment_is_ignored_and_that_is_said(
    tmp_path: Path, user_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYPILOT_API_SERVER_ENDPOINT", "https://user:canary-0123@sky.example")
    home = _home(tmp_path, "aws")
    (said,) = home.make(user_home)
    assert said.startswith("SKYPILOT_API_SERVER_ENDPOINT is ignored: ") and "canary" not in said
    assert "SKYPILOT_API_SERVER_ENDPOINT" not in home.environ()


def test_a_run_without_a_configuration_of_the_users_has_only_ours(tmp_path: Path, user_home: Path) -> None:
    home = _home(tmp_path, "aws", "lambda")
    assert home.make(user_home) == []
    ours = json.loads((home.folder / ".sky/config.yaml").read_text())
    assert ours == {"allowed_clouds": ["aws", "lambda"], "aws": {"remote_identity": "NO_UPLOAD"}}


def test_a_projects_configuration_is_said_to_be_left_out(
    tmp_path: Path, user_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".sky.yaml").write_text("aws: {vpc_name: of-the-project}")
    monkeypatch.chdir(tmp_path)
    (said,) = _home(tmp_path, "aws").make(user_home)
    assert said.startswith(".sky.yaml is ignored")


@pytest.mark.parametrize("text", ["aws: [canary", "- canary", "aws: canary", "\xff"])
def test_a_configuration_that_cannot_be_read_is_refused_and_not_shown(
    text: str, tmp_path: Path, user_home: Path
) -> None:
    (user_home / ".sky").mkdir()
    (user_home / ".sky/config.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(PreflightError) as refused:
        _home(tmp_path, "aws").make(user_home)
    assert "config.yaml" in refused.value.message
    assert "canary" not in f"{refused.value.message} {refused.value.why} {refused.value.hint}"


def test_g16_only_the_target_clouds_variables_reach_skypilot(tmp_path: Path, user_home: Path) -> None:
    home = _home(tmp_path, "aws")
    home.make(user_home)
    others = {"AZURE_CLIENT_SECRET": "a", "GOOGLE_API_KEY": "b", "HF_TOKEN": "c", "WANDB_API_KEY": "d"}
    environ = home.environ({"PATH": "/bin", "AWS_PROFILE": "p", **others})
    assert environ["AWS_PROFILE"] == "p"
    assert environ["HOME"] == str(home.folder)
    assert not set(environ) & set(others)


def test_skypilots_own_server_is_asked_without_the_users_proxy(tmp_path: Path, user_home: Path) -> None:
    home = _home(tmp_path, "aws")
    home.make(user_home)
    given = home.environ({"http_proxy": "http://proxy:3128", "no_proxy": "intranet"})
    assert given["http_proxy"] == "http://proxy:3128"
    assert given["no_proxy"] == "intranet,127.0.0.1,localhost"


def test_a_cloud_without_credentials_is_refused_with_what_to_do(
    tmp_path: Path, user_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PreflightError) as refused:
        _home(tmp_path, "vast").make(user_home)
    assert "vast" in refused.value.message
    assert refused.value.hint is not None and refused.value.hint.startswith("sky check vast")


def test_an_unknown_cloud_is_refused() -> None:
    with pytest.raises(PreflightError, match="awz"):
        clouds_of(["awz"])
    assert clouds_of(["k8s/ctx", "kubernetes", "aws/us-east-1/us-east-1a"]) == ["kubernetes", "aws"]


def test_removing_a_home_leaves_the_users_credentials(tmp_path: Path, user_home: Path) -> None:
    home = _home(tmp_path, "aws")
    home.make(user_home)
    home.make(user_home)
    home.remove()
    assert not home.folder.exists()
    assert (user_home / FIVE[0]).exists()


def test_the_port_is_chosen_once(tmp_path: Path, user_home: Path) -> None:
    home = _home(tmp_path, "aws")
    home.make(user_home)
    assert home.port() == home.port() == int(home.environ({})["SKYPILOT_API_SERVER_LOCAL_PORT"])
    assert not home.healthy()


def test_a_rented_machine_is_found_again_from_its_record(tmp_path: Path) -> None:
    machine = CloudMachine("slip-0123abcd", tmp_path, infra=["aws"], gpus="H100:4", idle_minutes=10)
    record = RunRecord("slip-0123abcd", created=0.0, machine=_is_a_machine(machine).describe())
    found = from_record(RunRecord.from_json(record.to_json()))
    assert isinstance(found, CloudMachine)
    assert found.describe() == machine.describe()
    found.down()
    assert found.proof().verified  # nothing was ever asked of a provider
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kinds", "text", "error", "code"),
    [
        (["ResourcesUnavailableError", "Exception"], "Failed to acquire resources", CapacityError, 4),
        (["NoCloudAccessError", "Exception"], "Cloud access is not set up", NoAccessError, 3),
        (["ApiServerConnectionError", "RuntimeError"], "Could not connect", PreflightError, 3),
        (["ModuleNotFoundError", "ImportError"], "No module named 'sky'", PreflightError, 3),
        (["URLError", "OSError"], "Failed to fetch aws catalog v8/vms.csv", PreflightError, 3),
        (["CloudError", "Exception"], "cluster\n\x1b[31mnot authorized\x1b[0m", SkyCallError, 3),
    ],
)
def test_skypilots_errors_become_ours(
    kinds: list[str], text: str, error: type[Exception], code: int, tmp_path: Path
) -> None:
    found = sky_process._translated("launch", kinds, text, tmp_path / "log")
    assert type(found) is error and found.exit_code == code
    assert found.why is not None and "\x1b" not in found.why and found.hint


@pytest.mark.slow
def test_g01_what_ends_a_cluster_is_imported_before_there_is_one(tmp_path: Path, user_home: Path) -> None:
    """Of SkyPilot and of ours: an upgrade in mid-run finds nothing left to import."""
    home = _home(tmp_path, "aws")
    home.make(user_home)
    done = subprocess.run(
        [sys.executable, PROGRAMS / "unit" / "late_imports.py"],
        capture_output=True,
        text=True,
        env=home.environ() | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]", done.stdout


@pytest.mark.slow
def test_g23_a_call_that_hangs_is_left_behind_and_the_next_one_is_answered(
    tmp_path: Path, user_home: Path
) -> None:
    home = _home(tmp_path, "aws")
    home.make(user_home)
    sky = SkyProcess(home, tmp_path / "skypilot.log")
    with pytest.raises(SkyCallTimeoutError):
        sky.call("version", 0.01)
    assert sky.call("version", 60.0)["version"]
    assert sky.call("cluster_status", 60.0, cluster="slip-0123abcd") is None
    with pytest.raises(SkyCallError, match="cluster_status failed"):
        sky.call("cluster_status", 60.0, wrong="x")
    assert home.processes()
    sky.end()
    assert not home.processes()
    assert os.listdir(home.folder)


def test_g31_skypilots_home_has_no_blank_in_its_name_whatever_ours_has(
    tmp_path: Path, user_home: Path
) -> None:
    """SkyPilot gives rsync the paths of its keys unquoted, and a Mac's homes are below one with a blank."""
    folder = tmp_path / "Application Support" / "sky"
    home = SkyHome(folder, ["aws"], "0123abcd")
    home.make(user_home)
    seen = Path(home.environ({})["HOME"])
    assert not any(letter.isspace() for letter in str(seen))
    assert seen.resolve() == folder.resolve()
    assert (seen / ".aws/credentials").read_text() == "secret of .aws/credentials"
    seen.unlink()  # swept out of the temporary folder
    assert Path(home.environ({})["HOME"]).resolve() == folder.resolve()
    home.remove()
    assert not seen.is_symlink() and not folder.exists()
    plain = _home(tmp_path, "aws")
    plain.make(user_home)
    assert plain.environ({})["HOME"] == str(plain.folder)


def test_g31_only_its_own_processes_are_asked_for_their_connections(
    tmp_path: Path, user_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking for everybody's takes root on a Mac."""

    def as_on_a_mac(*_kind: str) -> list[object]:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", as_on_a_mac)
    home = _home(tmp_path, "aws")
    home.make(user_home)
    program = PROGRAMS / "unit" / "answer_health.py"
    with subprocess.Popen(
        [sys.executable, program, "0.14.1", "0.14.1"], cwd=home.folder, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            (home.folder / "api-port").write_text(server.stdout.readline().strip())
            assert home.healthy()
        finally:
            server.kill()
    assert not home.healthy()
