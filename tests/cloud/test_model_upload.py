"""A user's own model on its way to a machine, over a real ssh that breaks: what is read of it, once."""

from __future__ import annotations

import sys
import textwrap

import pytest

from tests.cloud.rig import REPOSITORY, Rig

pytestmark = pytest.mark.slow

_PROGRAM = """
import hashlib, os, threading, time
from pathlib import Path
import psutil
from launcher.machines import model_upload
from launcher.machines.link import run_on
from launcher.machines.remote import RemoteFolder
from tests.cloud import bare
here = Path.cwd()
_, host = bare.rent(here)
model = here / "my model"
(model / "original").mkdir(parents=True)
blob = here / "blob"
blob.write_bytes(os.urandom(30_000_000))
(model / "model.safetensors").symlink_to(blob)  # as the hub's cache has it
for name in ("config.json", "tokenizer.json", "chat_template.jinja", "README.md", "pytorch_model.bin"):
    (model / name).write_text(name)
(model / "original" / "config.json").write_text("another form")
models = RemoteFolder(host, "/home/ubuntu/slipway-models/my-model", here)
told, lost = [], []

def cut():
    while True:
        for process in psutil.process_iter(["cmdline"]):
            if process.info["cmdline"] and process.info["cmdline"][0] == "ssh" and (
                "--server" in process.info["cmdline"]
            ):
                process.kill()
                return
        time.sleep(0.005)

cutting = threading.Thread(target=cut, daemon=True)
cutting.start()
model_upload.bring(models, model, told.append, lambda: lost.append(1))
cutting.join(10)
print(*told, sep="\\n")
assert lost and any("going on" in line for line in told), told
assert any(line.startswith("the model: 100%") for line in told), told
look = f"cd '{models.there}' && sha256sum model.safetensors && stat -c %i:%Z * && find . -type f | sort"
digest, *before = run_on(host, look).stdout.decode().split("\\n")
assert digest.split()[0] == hashlib.sha256(blob.read_bytes()).hexdigest()
files = [line for line in before if line.startswith("./")]
assert files == ["./chat_template.jinja", "./config.json", "./model.safetensors", "./tokenizer.json"], files
model_upload.bring(models, model, told.append)
assert run_on(host, look).stdout.decode().split("\\n") == [digest, *before]
"""


def test_a_model_of_the_users_is_brought_once_and_goes_on_where_the_line_broke(rig: Rig) -> None:
    environ = rig.environ(PYTHONPATH=str(REPOSITORY))
    print(rig.run([sys.executable, "-c", textwrap.dedent(_PROGRAM)], seconds=90, environ=environ).ok())
