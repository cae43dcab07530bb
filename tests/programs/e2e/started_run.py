"""Starts a run from Python, says which, and waits to be killed: `started_run.py FROM_RUN`."""

import json
import sys
import time

from launcher.client import start

run = start(from_run=sys.argv[1], name="started", quiet=True)
print(json.dumps({"run": run.run_id, "base_url": run.base_url, "api_key": run.api_key}), flush=True)
while True:
    time.sleep(60)
