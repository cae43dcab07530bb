"""Credentials that are no keys in a file: what SkyPilot gets of them in its private home, and what is said.

AWS is moto's server and SkyPilot the real one, asked as `launch gc` asks; the tools that log in are scripts.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from launcher.backends.skypilot import orphaned_machines
from launcher.backends.skypilot.sky_home import SkyHome
from launcher.backends.skypilot.sky_process import SkyProcess
from launcher.base.errors import PreflightError
from launcher.config import credential_expiry
from launcher.types.plan import Plan, RentedGpus
from tests.support.played_aws import PlayedAws
from tests.support.typed import Typed
from tests.support.waiting import WAIT_SECONDS

# Ends a call that hangs, and measures nothing.
_BOUND_SECONDS = 300.0


@pytest.fixture(scope="module")
def aws() -> Iterator[PlayedAws]:
    played = PlayedAws()
    yield played
    played.close()


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home, and nothing of AWS in the environment."""
    for name in [
        name for name in os.environ if name.startswith(("AWS_", "KUBECONFIG", "CLOUDSDK_", "AZURE_"))
    ]:
        monkeypatch.delenv(name)
    home = tmp_path / "user"
    (home / ".aws").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    return home


def answered(tmp_path: Path, bound_seconds: float = _BOUND_SECONDS) -> list[str]:
    """The regions that let SkyPilot list machines with what it has in a home of its own."""
    home = SkyHome(tmp_path / "sky", ["aws"], "0123abcd")
    home.make()
    sky = SkyProcess(home, tmp_path / "skypilot.log")
    try:
        call = sky.call("machines_named", bound_seconds, cloud="aws", name="slip-*", label="none")
    finally:
        sky.end()
    return call["answered"]


@pytest.mark.process
def test_p05_a_program_that_prints_keys_finds_what_it_keeps_in_the_users_home(
    aws: PlayedAws, user: Path, tmp_path: Path
) -> None:
    """As aws-vault and granted do: their store is below HOME, and SkyPilot's HOME is another one."""
    keys = {"Version": 1, "AccessKeyId": "testing", "SecretAccessKey": "canary-0123", "SessionToken": "t"}
    (user / ".vault").mkdir()
    (user / ".vault" / "prod").write_text(json.dumps(keys))
    (tmp_path / "vault").write_text('#!/bin/sh\nexec cat "$HOME/.vault/$1"\n')
    (tmp_path / "vault").chmod(0o755)
    (user / ".aws" / "config").write_text(
        f"[default]\nregion = us-east-1\nendpoint_url = {aws.endpoint}\n"
        f"credential_process = {tmp_path / 'vault'} prod\n"
    )
    assert "AWS us-east-1" in answered(tmp_path)
    kept = [path for path in (tmp_path / "sky").rglob("*") if path.is_file() and not path.is_symlink()]
    assert kept and not [path for path in kept if b"canary-0123" in path.read_bytes()], "no copy of a key"


@pytest.mark.process
def test_p05_a_profile_that_wants_a_code_is_an_error_and_never_reads_our_own_pipe(
    aws: PlayedAws, user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = f"region = us-east-1\nendpoint_url = {aws.endpoint}\n"
    (user / ".aws" / "config").write_text(
        f"[default]\n{here}[profile admin]\n{here}source_profile = default\n"
        "role_arn = arn:aws:iam::123456789012:role/admin\nmfa_serial = arn:aws:iam::123456789012:mfa/me\n"
    )
    keys = "aws_access_key_id = testing\naws_secret_access_key = testing\n"
    (user / ".aws" / "credentials").write_text(f"[default]\n{keys}")
    monkeypatch.setenv("AWS_PROFILE", "admin")
    with pytest.raises(PreflightError, match="asks for a code") as refused:
        answered(tmp_path)
    assert "aws configure export-credentials" in str(refused.value.hint)


@pytest.mark.process
def test_p05_profiles_in_files_of_their_own_are_found_from_the_private_home(
    aws: PlayedAws, user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (user / "work").mkdir()
    here = f"region = us-east-1\nendpoint_url = {aws.endpoint}\n"
    (user / "work" / "config").write_text(f"[profile lab]\n{here}")
    (user / "work" / "keys").write_text(
        "[lab]\naws_access_key_id = testing\naws_secret_access_key = testing\n"
    )
    (user / ".aws").rmdir()
    monkeypatch.setenv("AWS_CONFIG_FILE", "~/work/config")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "~/work/keys")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert "AWS us-east-1" in answered(tmp_path)


# ------------------------------------------------------------------ clusters of one's own


def _kubeconfig(user: Path, command: str) -> None:
    (user / ".kube").mkdir(exist_ok=True)
    plugin = {
        "exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": command, "args": ["token"]}
    }
    (user / ".kube" / "config").write_text(json.dumps({"users": [{"name": "me", "user": plugin}]}))


@pytest.mark.parametrize("command", ["aws", "/usr/local/bin/aws-iam-authenticator"])
def test_p05_an_eks_plugin_has_its_account_and_none_of_it_goes_to_a_machine(
    user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    _kubeconfig(user, command)
    (user / ".aws" / "config").write_text("[default]\n")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    home = SkyHome(tmp_path / "sky", ["kubernetes"], "0123abcd")
    home.make()
    assert (home.folder / ".aws" / "config").exists() and home.environ()["AWS_PROFILE"] == "lab"
    config = json.loads((home.folder / ".sky/config.yaml").read_text())
    assert config == {"aws": {"remote_identity": "NO_UPLOAD"}, "allowed_clouds": ["kubernetes"]}


@pytest.mark.parametrize(
    ("command", "name", "place"),
    [
        ("gke-gcloud-auth-plugin", "CLOUDSDK_CONFIG", ".config/gcloud"),
        ("kubelogin", "AZURE_CONFIG_DIR", ".azure"),
    ],
)
def test_p05_gke_and_aks_plugins_are_told_where_theirs_is(
    user: Path, tmp_path: Path, command: str, name: str, place: str
) -> None:
    """Told, not linked: what SkyPilot sees in its home, it uploads (G16)."""
    _kubeconfig(user, command)
    (user / place).mkdir(parents=True)
    home = SkyHome(tmp_path / "sky", ["kubernetes"], "0123abcd")
    home.make()
    assert home.environ()[name] == str(user / place)
    assert not (home.folder / place).exists() and not (home.folder / ".aws").exists()


def test_p05_a_cluster_without_such_a_plugin_and_another_target_see_no_other_account(
    user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _kubeconfig(user, "my-own-login")
    (user / ".lambda_cloud").mkdir()
    monkeypatch.setenv("AWS_PROFILE", "lab")
    for cloud in ("kubernetes", "lambda"):
        home = SkyHome(tmp_path / cloud, [cloud], "0123abcd")
        home.make()
        assert not (home.folder / ".aws").exists() and "AWS_PROFILE" not in home.environ()


# ------------------------------------------------------------------ the user's SkyPilot configuration


@pytest.mark.parametrize("identity", ["lab-role", [{"slip-*": "lab-role"}]])
def test_p05_a_role_and_a_profile_of_the_users_configuration_pass(
    user: Path, tmp_path: Path, identity: Any
) -> None:
    """With a role of the user's SkyPilot makes none, which many may not."""
    (user / ".sky").mkdir()
    workspaces = {"lab": {"aws": {"profile": "lab-profile"}, "private": True}}
    said = {"aws": {"remote_identity": identity}, "active_workspace": "lab", "workspaces": workspaces}
    (user / ".sky" / "config.yaml").write_text(json.dumps(said))
    home = SkyHome(tmp_path / "sky", ["aws"], "0123abcd")
    left_out = home.make()
    config = json.loads((home.folder / ".sky/config.yaml").read_text())
    assert config["aws"] == {"remote_identity": identity}
    assert config["workspaces"] == {"default": {"aws": {"profile": "lab-profile"}}}
    assert not [line for line in left_out if "remote_identity" in line]


@pytest.mark.parametrize("identity", ["LOCAL_CREDENTIALS", "local_credentials", [{"*": "LOCAL_CREDENTIALS"}]])
def test_p05_what_would_upload_the_users_keys_still_does_not_pass(
    user: Path, tmp_path: Path, identity: Any
) -> None:
    (user / ".sky").mkdir()
    (user / ".sky" / "config.yaml").write_text(json.dumps({"aws": {"remote_identity": identity}}))
    home = SkyHome(tmp_path / "sky", ["aws"], "0123abcd")
    (said,) = home.make()
    assert "aws.remote_identity is ignored" in said
    config = json.loads((home.folder / ".sky/config.yaml").read_text())
    assert config["aws"] == {"remote_identity": "NO_UPLOAD"}


# ------------------------------------------------------------------ sessions that end


def _plan(deadline_seconds: float | None = 4 * 3600.0, *infra: str) -> Plan:
    rented = RentedGpus("H100:4", infra or ("aws",), 10, None, train_gpus=1, infer_gpus=3)
    return Plan("4×H100 on aws", "tiny", 27.52, deadline_seconds, 900.0, None, rented)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(time.time() + seconds, UTC).isoformat()


def _of_variables(user: Path, seconds: float) -> dict[str, str]:
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s", "AWS_SESSION_TOKEN": "t"}
    return keys | {"AWS_CREDENTIAL_EXPIRATION": _iso(seconds)}


def _of_a_file(user: Path, seconds: float) -> dict[str, str]:
    told = f"[saml]\naws_session_token = t\nx_security_token_expires = {_iso(seconds)}\n"
    (user / ".aws" / "credentials").write_text(told)
    return {"AWS_PROFILE": "saml"}


def _of_sso(user: Path, seconds: float) -> dict[str, str]:
    (user / ".aws" / "config").write_text("[profile sso]\nsso_start_url = https://lab.example/start\n")
    name = hashlib.sha1(b"https://lab.example/start").hexdigest()
    cache = user / ".aws" / "sso" / "cache" / f"{name}.json"
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text(json.dumps({"accessToken": "t", "expiresAt": _iso(seconds).replace("+00:00", "Z")}))
    return {"AWS_PROFILE": "sso"}


@pytest.mark.parametrize("login", [_of_variables, _of_a_file, _of_sso])
def test_p05_a_session_that_ends_before_the_deadline_is_said_beside_the_plan(user: Path, login: Any) -> None:
    (said,) = credential_expiry.warnings(_plan(), login(user, 42 * 60 + 30), user)
    assert said.startswith("your AWS session ends in 42m") and "before the deadline" in said and "4h" in said
    assert credential_expiry.warnings(_plan(1800.0), login(user, 42 * 60.0), user) == []
    (said,) = credential_expiry.warnings(_plan(None), login(user, 42 * 60.0), user)
    assert "has no deadline" in said
    (said,) = credential_expiry.warnings(_plan(), login(user, -60.0), user)
    assert "has ended" in said
    assert credential_expiry.warnings(_plan(3600.0, "lambda"), login(user, 60.0), user) == [], (
        "none of its clouds"
    )


def test_p05_what_is_renewed_by_itself_or_never_ends_is_not_said(user: Path) -> None:
    variables = _of_sso(user, 60.0)
    (cache,) = (user / ".aws" / "sso" / "cache").iterdir()
    cache.write_text(json.dumps(json.loads(cache.read_text()) | {"refreshToken": "r"}))
    assert credential_expiry.warnings(_plan(), variables, user) == []
    assert (
        credential_expiry.warnings(_plan(), {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s"}, user)
        == []
    )
    (user / ".aws" / "config").write_text("[default]\ncredential_process = vault prod\n")
    assert credential_expiry.warnings(_plan(), {}, user) == []
    (user / ".aws" / "credentials").write_text("[default\n")
    assert credential_expiry.warnings(_plan(), {}, user) == []


@pytest.mark.process
def test_p14_doctor_asks_the_clouds_before_a_price_is_agreed_to(
    aws: PlayedAws, user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first time with keys that may only look, the second with a session that has ended."""
    monkeypatch.setattr(orphaned_machines, "LIST_SECONDS", WAIT_SECONDS)
    aws.forget()
    (user / ".aws").rmdir()
    aws.furnish(user)
    typed = Typed(tmp_path / "project", tmp_path / "launch")
    aws.denied, aws.refuses = {"eu-west-1"}, lambda region, action, query: action == "RunInstances"
    refused = asked(typed, LAUNCH_GPUS="H100:4")
    assert refused["state"] == "warn" and "ec2:RunInstances" in refused["fix"]
    why = "it lists machines, but rents no H100:4 in us-east-1, us-west-2: "
    assert refused["detail"].startswith(why) and "UnauthorizedOperation" in refused["detail"]
    aws.expired = lambda key: True
    ended = asked(typed)
    assert (ended["state"], ended["fix"]) == ("warn", "sky check aws")
    assert "it does not answer" in ended["detail"] and "RequestExpired" in ended["detail"]
    aws.forget()


def asked(typed: Typed, **environ: str) -> dict[str, Any]:
    """What `launch doctor --ask` says of AWS."""
    found = json.loads(typed("doctor", "--ask", "--json", **environ).stdout)
    return next(check for check in found["checks"] if check["name"] == "cloud aws")
