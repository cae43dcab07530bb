"""Leaves a launch in SkyPilot's request books, as a sudden end does: `leave_request.py CLUSTER PID`."""

from __future__ import annotations

import asyncio
import os
import sys
import time

from sky.server.requests import payloads, requests


def main(cluster: str, pid: int) -> None:
    asyncio.run(
        requests.create_if_not_exists_async(
            requests.Request(
                request_id="before",
                name="sky.launch",
                entrypoint=print,
                request_body=payloads.RequestBody(),
                status=requests.RequestStatus.RUNNING,
                created_at=time.time(),
                user_id="0",
                pid=pid,
                cluster_name=cluster,
            )
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    os._exit(0)  # the database's thread does not end
