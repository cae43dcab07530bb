"""model_size.py: how large a model is, by its files, by the hub (a server here), or by its name."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.models import model_size

FILES = {
    "config.json": 700,
    "model-00001-of-00002.safetensors": 4_000_000_000,
    "model-00002-of-00002.safetensors": 3_000_000_000,
    "consolidated.safetensors": 7_000_000_000,
    "original/model.safetensors": 7_000_000_000,
}


class _Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.path == "/api/models/acme/Big-7B?blobs=true"
        siblings = [{"rfilename": name, "size": size} for name, size in FILES.items()]
        body = json.dumps({"siblings": siblings} if known else {"error": "no such model"}).encode()
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
        """Quiet."""


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
    server.shutdown()
    server.server_close()


def test_the_hubs_figures_count_what_is_loaded_once(environ: dict[str, str]) -> None:
    assert model_size.weights_bytes("acme/Big-7B", environ) == 7_000_000_000


def test_without_the_hub_the_name_says_it(environ: dict[str, str]) -> None:
    assert model_size.weights_bytes("acme/Other-1.5B", environ) == pytest.approx(3.3e9)
    assert model_size.weights_bytes("acme/Big-7B", {**environ, "HF_HUB_OFFLINE": "1"}) == pytest.approx(
        15.4e9
    )
    assert model_size.weights_bytes("acme/nameless", environ) is None


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", 7),
        ("Qwen/Qwen2.5-0.5B", 0.5),
        ("meta-llama/Llama-3.1-70B-Instruct", 70),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 0.135),
        ("mistralai/Mixtral-8x7B-v0.1", 56),
        ("acme/plain", None),
        ("acme/v2b1", None),
    ],
)
def test_a_name_says_its_parameters(name: str, billions: float | None) -> None:
    said = model_size.bytes_by_name(name)
    assert said == (None if billions is None else pytest.approx(billions * 2.2e9))


def test_a_folder_is_as_large_as_its_weights(tmp_path: Path) -> None:
    assert model_size.weights_bytes(str(tmp_path), {}) is None
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "consolidated.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "tokenizer.json").write_bytes(b"x" * 50)
    assert model_size.weights_bytes(str(tmp_path), {}) == 1000
    tiny = model_size.weights_bytes("tiny", {})
    assert tiny is not None and 10**5 < tiny < 10**9
