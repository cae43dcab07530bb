"""launcher/base/proxies.py: none before this computer's own addresses; a machine gets those it can use."""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path

import pytest

from launcher.base import credentials
from launcher.base.log import REDACTOR
from launcher.records.endpoint import LocalEndpoint

LOCAL = "127.0.0.1,localhost"


def program(tmp_path: Path, environ: dict[str, str]) -> dict[str, str]:
    door = LocalEndpoint("http://127.0.0.1:7453", "token", "slip-1", tmp_path, 180.0)
    given = door.environ(environ)
    return {name: value for name, value in given.items() if name.lower().endswith("_proxy")}


@pytest.mark.parametrize(
    ("user", "exceptions"),
    [
        ({}, LOCAL),
        ({"no_proxy": "intranet"}, f"intranet,{LOCAL}"),
        ({"NO_PROXY": "intranet, 127.0.0.1"}, f"intranet,{LOCAL}"),
        ({"HTTPS_PROXY": "http://corp:3128"}, LOCAL),
    ],
)
def test_p15_no_proxy_stands_before_this_computers_addresses(
    tmp_path: Path, user: dict[str, str], exceptions: str
) -> None:
    assert program(tmp_path, user) == user | {"no_proxy": exceptions, "NO_PROXY": exceptions}


def test_p15_a_macs_own_proxy_stays_for_all_but_this_computer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"https": "http://corp:3128"})
    given = program(tmp_path, {})
    assert given == {"https_proxy": "http://corp:3128", "no_proxy": LOCAL, "NO_PROXY": LOCAL}
    assert program(tmp_path, {"NO_PROXY": "*"}) == {"no_proxy": "*", "NO_PROXY": "*"}


def test_p15_a_rented_runtime_gets_the_hubs_settings_and_the_proxies_that_it_can_use() -> None:
    there = {
        "HF_ENDPOINT": "https://hub.corp", "HF_HUB_DOWNLOAD_TIMEOUT": "60", "HF_HUB_DISABLE_XET": "1",
        "HTTPS_PROXY": "http://me:hidden-word@corp:3128", "http_proxy": "corp:3128", "no_proxy": "intranet",
    }  # fmt: skip
    here = {
        "HF_HUB_CACHE": "/models", "HF_HUB_OFFLINE": "1", "HF_HOME": "/models", "HF_TOKEN": "t",
        "PATH": "/bin",
        "ALL_PROXY": "socks5://127.0.0.1:1080", "HTTP_PROXY": "localhost:8080", "all_proxy": "",
    }  # fmt: skip
    exceptions = dict.fromkeys(("no_proxy", "NO_PROXY"), f"intranet,{LOCAL}")
    assert credentials.rented_environ(there | here) == there | exceptions
    assert credentials.rented_environ({"HF_ENDPOINT": "http://127.0.0.1:5000", "NO_PROXY": "x"} | here) == {}


def test_p15_the_password_of_a_proxy_is_in_no_log() -> None:
    credentials.hide_secrets_of({"https_proxy": "http://me:hidden-word@corp:3128"})
    assert (
        REDACTOR.redact("at http://me:hidden-word@corp:3128, hidden-word") == "at http://***@corp:3128, ***"
    )
