"""failpoints.py: every named instant is in the code, and nothing happens where none is armed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import launcher
from launcher.base import failpoints
from launcher.base.errors import ConfigError
from tests.support.environment import PROGRAMS

LAUNCHER = Path(launcher.__file__).parent


def test_every_name_is_an_instant_of_the_code_and_every_instant_has_a_name() -> None:
    source = "".join(path.read_text() for path in LAUNCHER.rglob("*.py"))
    for name in failpoints.NAMES:
        assert source.count(f'failpoint("{name}")') == 1, name
    assert source.count('failpoint("') == len(failpoints.NAMES)


def test_unarmed_it_is_inert_and_imports_nothing() -> None:
    subprocess.run([sys.executable, PROGRAMS / "unit" / "pass_unarmed_instant.py"], check=True, env={})


def test_a_text_that_names_no_instant_is_an_error_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, "cli.armed:explode")
    failpoints._of_this_process.cache_clear()
    try:
        with pytest.raises(ConfigError, match="LAUNCH_FAILPOINT cannot be read") as refused:
            failpoints.failpoint("cli.armed")
    finally:
        failpoints._of_this_process.cache_clear()
    assert "explode" in str(refused.value.why) and refused.value.hint == "unset LAUNCH_FAILPOINT"
