"""A model of the hub that is not there, not ours to have, or too large for the disk is refused with 3.

The hub is played on loopback and remembers what it was asked. A model in a folder: `test_refusals_models.py`.
"""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import unquote

import pytest

from launcher.base import disk
from launcher.base.errors import PreflightError
from launcher.config import preflight
from launcher.models import known_models
from tests.support.refusals import Place, Refused, check, place

__all__ = ["place"]

pytestmark = pytest.mark.process


@dataclass
class Hub:
    """A model hub on loopback; answers every question alike and remembers who asked."""

    status: int = 200
    body: bytes = b'{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}'
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def hub(place: Place) -> Iterator[Hub]:
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.asked.append((self.path, self.headers.get("Authorization")))
            self.send_response(hub.status)
            self.send_header("Content-Length", str(len(hub.body)))
            self.end_headers()
            self.wfile.write(hub.body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY"):
        place.patch.delenv(name, raising=False)
    place.patch.setenv("HF_ENDPOINT", hub.url)
    place.patch.setenv("HF_HOME", str(place.folder / "hf"))
    yield hub
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "token", "what", "why"),
    [
        (404, b"", None, "no model some/model", "no such model"),
        (401, b"", None, "cannot be downloaded", "it is gated and HF_TOKEN is not set"),
        (403, b"", "hf_0123456789", "cannot be downloaded", "the HF_TOKEN account has no access"),
        (500, b"", None, "cannot be looked up", "answered 500"),
        (200, b"<html>", None, "cannot be used", "its config.json is not JSON"),
        (
            200,
            b'{"architectures": ["BertModel"]}',
            None,
            "cannot be used",
            "BertModel is not a causal language model",
        ),
    ],
)
def test_a_model_of_the_hub_is_looked_at(hub: Hub, place: Place, status, body, token, what, why) -> None:
    hub.status, hub.body = status, body
    if token:
        place.write(".env", f"HF_TOKEN={token}\n")
    check(Refused("--model some/model", 3, what, why, ""), place)
    assert hub.asked == [("/some/model/resolve/main/config.json", token and f"Bearer {token}")]


@pytest.mark.parametrize("model", ["a b/c", "a\tb/c", "ä/b", "a/b?c#d"])
def test_a_name_that_no_address_may_hold_is_asked_for_all_the_same(hub: Hub, model: str) -> None:
    from launcher.models import hub as the_hub
    from launcher.models import model_config, model_size

    hub.status = 404
    assert model_config.find_config(model, os.environ) is None
    assert model_size.weights_bytes(model, os.environ) is None
    with pytest.raises(PreflightError) as refused:
        the_hub.check(model, os.environ, None)
    assert refused.value.message == f"no model {model}"
    assert all(unquote(path.split("?blobs")[0]).count(model) for path, _ in hub.asked)


def test_a_name_that_is_nearly_a_known_one_is_asked_back(hub: Hub, place: Place) -> None:
    for hub.status in (404, 401):
        why = "did you mean Qwen/Qwen3-1.7B?"
        check(
            Refused("--model Qwen/Qwen3-1.7", 3, "Qwen/Qwen3-1.7", why, "launch --model Qwen/Qwen3-1.7B"),
            place,
        )


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("Qwen/Qwen3-1.7", "Qwen/Qwen3-1.7B"),
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("meta-llama/Llama-3.1-8B-Instrct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("qwen/qwen3-8b", None),
        ("Qwen/Qwen3-2B", None),
        ("Qwen/Qwen2.5-72B-Instruct", None),
        ("gpt", None),
    ],
)
def test_a_model_of_another_size_is_not_what_was_meant(typed: str, meant: str | None) -> None:
    assert known_models.closest_model(typed) == meant


def test_a_disk_too_full_for_the_download_is_3(hub: Hub, place: Place) -> None:
    sizes = [("model.safetensors", 3 * 10**9), ("model.bin", 9 * 10**9), ("config.json", None)]
    siblings = [{"rfilename": name, "size": size or 10**3} for name, size in sizes]
    hub.body = json.dumps({"architectures": ["Qwen2ForCausalLM"], "siblings": siblings}).encode()
    place.patch.setattr(disk, "free_bytes", lambda folder: 2 * 10**9)
    what = "the model some/model needs 3.0 GB of disk"
    check(Refused("--model some/model", 3, what, "2.0 GB are free", "HF_HOME"), place)


def test_a_hub_that_does_not_answer_is_3(hub: Hub, place: Place) -> None:
    place.patch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    what = "the model some/model is not on this computer and cannot be looked up"
    check(Refused("--model some/model", 3, what, "refused", "or --model FOLDER"), place)
    place.patch.setenv("HF_HUB_OFFLINE", "1")
    check(
        Refused("--model some/model", 3, "not on this computer", "HF_HUB_OFFLINE is set", "--model FOLDER"),
        place,
    )


def test_a_downloaded_model_is_looked_at_without_the_network(hub: Hub, place: Place) -> None:
    snapshot = place.folder / "hf" / "hub" / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    assert preflight.find_model("some/model") == "some/model"
    assert hub.asked == []
