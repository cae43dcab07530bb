"""Says by how many seconds the clock that counts sleep is ahead of the one that does not."""

from __future__ import annotations

import time

from launcher.base.clock import boot_seconds

if __name__ == "__main__":
    print(boot_seconds() - time.monotonic())
