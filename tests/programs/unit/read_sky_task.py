"""Has SkyPilot read a task file, which takes its machine down by itself: `read_sky_task.py PATH`."""

from __future__ import annotations

import sys

import sky

if __name__ == "__main__":
    assert hasattr(sky, "launch"), "this is our folder, not SkyPilot"
    (resources,) = sky.Task.from_yaml(sys.argv[1]).resources
    autostop = resources.autostop_config
    assert autostop is not None and autostop.down and autostop.enabled
