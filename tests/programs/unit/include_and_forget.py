"""Has plain ssh find a run of the home it is given and forget it again, so many times."""

from __future__ import annotations

import sys
from pathlib import Path

from launcher.backends.ssh import ssh_config
from launcher.backends.ssh.link import SshHost

if __name__ == "__main__":
    folder = Path(sys.argv[1]) / "runs" / "slip-0123abcd"
    folder.mkdir(parents=True)
    for _ in range(int(sys.argv[2])):
        ssh_config.write(folder, SshHost("10.0.0.7", "me", folder / "key", folder / "known_hosts"), ["demo"])
        ssh_config.include(folder.parent)
        assert ssh_config.included(folder.parent)
        ssh_config.forget(folder)
        assert not ssh_config.included(folder.parent)
