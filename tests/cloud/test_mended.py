"""Three typos are one rental: on a terminal a program that failed before its first step is mended and run
again on the machine that is paid for already, and without a key that machine goes (run/program_retry.py)."""

from __future__ import annotations

import json
import os
import pty

import pytest

from tests.cloud.launched import LAUNCH, left
from tests.cloud.rig import Rig
from tests.support.terminals import Terminal
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

_ASKS = "Enter runs it again on the same endpoint, which goes on costing $27.52/h"
_MENDED = """from openai import OpenAI
from launcher.client import connect
run = connect()
client = OpenAI(base_url=run.base_url, api_key=run.api_key)
asked = [{"role": "user", "content": "a cat"}]
said = client.chat.completions.create(model="policy", messages=asked, max_tokens=4)
print("mended:", len(said.choices))
another_name
"""


@pytest.mark.long  # in every run: tests/unit/test_program_retry.py, without a cloud
def test_s03_a_rented_endpoint_outlives_a_name_error_and_ends_after_idle_without_a_key(
    runtime_rig: Rig,
) -> None:
    rig, program = runtime_rig, runtime_rig.folder / "my.py"
    program.write_text("import os\nundefined_name\n")
    screen, theirs = pty.openpty()
    words = [LAUNCH, "--gpus", "H100:4", "--infra", "aws", "--idle", "1m", "--", "python", str(program)]
    environ = {name: it for name, it in rig.environ(SLIPWAY_CLOUD_VARIANT="cpu").items() if name != "CI"}
    terminal = Terminal(screen)
    launched = rig.start(words, environ=environ, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    terminal.shows("Proceed? [y/N]")
    terminal.type("y\n")
    terminal.shows("[y/N]", 2)
    terminal.type("n\n")
    terminal.shows(_ASKS, seconds=900)
    assert "NameError: name 'undefined_name'" in terminal.text
    program.write_text(_MENDED)
    terminal.type("\n")
    terminal.shows(_ASKS, 2)
    assert "mended: 1" in terminal.text and "NameError: name 'another_name'" in terminal.text
    assert not rig.witness("terminate")
    # Nobody presses a key.
    assert launched.wait(600) == 6, terminal.text
    terminal.shows("down: verified")
    print(terminal.text)
    (run,) = rig.witness("run")
    assert [one["id"] for one in rig.witness("terminate")] == [run["id"]]
    (folder,) = (rig.folder / "launch" / "runs").glob("slip-*")
    record = json.loads((folder / "record.json").read_text())
    assert record["state"] == "verified" and record["exit_code"] == 1
    assert terminal.text.count("ready: http") == 1
    wait_until(lambda: not left(rig), what=lambda: f"{left(rig)} to be gone")
