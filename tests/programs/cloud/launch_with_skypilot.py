"""SkyPilot alone launches a task and ends its machine: `python launch_with_skypilot.py TASK.yaml`."""

from __future__ import annotations

import sys

import sky


def main(task_file: str) -> None:
    task = sky.Task.from_yaml(task_file)
    autodown = {"idle_minutes": 10, "down": True, "wait_for": "none"}
    task.set_resources(sky.Resources(infra="aws", accelerators="H100:4").copy(autostop=autodown))
    sky.stream_and_get(sky.launch(task, cluster_name="slip-0123abcd"))
    print([(c["name"], c["autostop"], c["to_down"]) for c in sky.get(sky.status())])
    sky.stream_and_get(sky.down("slip-0123abcd"))


if __name__ == "__main__":
    main(sys.argv[1])
