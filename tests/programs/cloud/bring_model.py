"""Brings a user's own model to a machine over a line that is cut once, and again when nothing is missing."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
from pathlib import Path

import psutil

from launcher.backends.ssh import model_upload
from launcher.backends.ssh.link import run_on
from launcher.backends.ssh.remote_folder import RemoteFolder
from tests.cloud import bare
from tests.support.waiting import wait_until

HERE = Path.cwd()
WAIT_SECONDS = 240.0
BROUGHT = ["./chat_template.jinja", "./config.json", "./model.safetensors", "./tokenizer.json"]


def make_model() -> tuple[Path, str]:
    """A model's folder, with files beside it that are not brought, and the digest of its weights."""
    model, blob = HERE / "my model", HERE / "blob"
    (model / "original").mkdir(parents=True)
    blob.write_bytes(os.urandom(30_000_000))
    (model / "model.safetensors").symlink_to(blob)  # as the hub's cache has it
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "README.md", "pytorch_model.bin"):
        (model / name).write_text(name)
    (model / "original" / "config.json").write_text("another form")
    return model, hashlib.sha256(blob.read_bytes()).hexdigest()


def cut() -> bool:
    """Kill the ssh that copies, where there is one."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or [""]
        if command[0] == "ssh" and "--server" in command:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                return True
    return False


def main() -> None:
    _, host = bare.rent(HERE)
    model, expected = make_model()
    models = RemoteFolder(host, "/home/ubuntu/slipway-models/my-model", HERE)
    told: list[str] = []
    lost: list[int] = []

    watch = functools.partial(wait_until, cut, WAIT_SECONDS, rarest_seconds=0.005)
    cutting = threading.Thread(target=watch, daemon=True)
    cutting.start()
    model_upload.upload(models, model, told.append, lambda: lost.append(1))
    cutting.join(10)
    print(*told, sep="\n")
    assert lost and any("continuing" in line for line in told), told
    assert any(line.startswith("the model: 30 MB of 30 MB") for line in told), told

    look = f"cd '{models.there}' && sha256sum model.safetensors && stat -c %i:%Z * && find . -type f | sort"
    digest, *before = run_on(host, look).stdout.decode().split("\n")
    assert digest.split()[0] == expected
    files = [line for line in before if line.startswith("./")]
    assert files == BROUGHT, files
    model_upload.upload(models, model, told.append)
    assert run_on(host, look).stdout.decode().split("\n") == [digest, *before]


if __name__ == "__main__":
    main()
