"""A contributor's machine: its packages are named, and the fast loop needs none of the test cloud's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.config import remote_tools
from tests.support.environment import REPOSITORY

# What only the test cloud needs.
_PACKAGED = {"ip", "iptables", "patch", "rsync", "scp", "ssh", "sshd", "ssh-keygen", "sudo", "unshare"}


def test_n12_the_contributors_page_names_where_the_packages_are_and_they_are_there() -> None:
    page = (REPOSITORY / "tests" / "README.md").read_text()
    assert "`.ci/run` lists the Debian packages" in page
    listed = (REPOSITORY / ".ci" / "run").read_text().split()
    assert {*remote_tools.TOOLS.values(), "openssh-server", "iproute2", "util-linux"} <= set(listed)


@pytest.mark.long
def test_n12_the_quick_tests_pass_without_a_package_of_the_test_cloud(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        for tool in Path(folder).iterdir() if Path(folder).is_dir() else ():
            if tool.name not in _PACKAGED and not (tmp_path / "bin" / tool.name).exists():
                (tmp_path / "bin" / tool.name).symlink_to(tool)
    environ = {**os.environ, "PATH": str(tmp_path / "bin")}
    assert shutil.which("rsync", path=environ["PATH"]) is None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "quick", "tests/unit"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
