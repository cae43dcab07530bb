"""Asks its run for the status with nothing but what it finds in its environment, and leaves `seen`."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path


def main(environ: dict[str, str]) -> None:
    root = environ["LAUNCH_BASE_URL"].removesuffix("/v1")
    request = urllib.request.Request(f"{root}/slipway/status")
    request.add_header("Authorization", f"Bearer {environ['LAUNCH_API_KEY']}")
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        status = json.load(answer)
    assert status["run_id"] == environ["LAUNCH_RUN_ID"] and environ["LAUNCH_MODEL"] == "policy"
    assert "OPENAI_API_KEY" not in environ
    (Path(environ["LAUNCH_RUN_DIR"]) / "seen").write_text("yes")


if __name__ == "__main__":
    main(dict(os.environ))
