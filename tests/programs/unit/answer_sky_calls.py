"""Stands in for `sky_calls.py`: `answer_sky_calls.py PROVIDER`, a folder whose files are the machines.

Like SkyPilot it writes in its HOME at each call, and fails where it cannot. Its books are HOME/books.json; a
launch puts there what is in PROVIDER.json.
A `down` that is its API server's to do fails where none answers at this process's port.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any


def answer(provider: Path, call: str, arguments: dict[str, Any]) -> Any:
    """What SkyPilot would say."""
    home = Path(os.environ["HOME"])
    (home / "touched").write_text(call * 64)
    if call == "cluster_status":
        books = home / "books.json"
        return json.loads(books.read_text()) if books.exists() else None
    if call == "version":
        return {}
    if call == "account":
        return None
    if call == "offers":
        return {"offers": []}
    if call == "launch":
        (home / "books.json").write_text(provider.with_suffix(".json").read_text())
        (provider / "i-0123").touch()
        return json.loads((home / "books.json").read_text())
    if call == "candidates":
        return {"providers": [], "unasked": []}
    if call == "instances":
        found = [sorted(os.listdir(provider)) for _ in arguments["providers"]]
        nobody = {"refused": [None for _ in found], "denied": [False for _ in found]}
        nobody["others"] = [None for _ in found]
        return {"instances": found, **nobody}
    if call == "down" and arguments["by_server"]:
        port = os.environ["SKYPILOT_API_SERVER_LOCAL_PORT"]
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(f"http://127.0.0.1:{port}/api/health", timeout=30).close()
    if call == "down":
        (home / "ended-by-name").touch()
    if call in ("terminate", "down"):
        for machine in provider.iterdir():
            machine.unlink()
        return {"known": True}
    raise RuntimeError(f"nobody answers {call} here")


def main(provider: Path) -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            said: dict[str, Any] = {"answer": answer(provider, asked["call"], asked["arguments"])}
        except Exception as error:  # noqa: BLE001 - as the real one does
            print(f"Error: {error}", file=sys.stderr, flush=True)
            said = {"error": {"kinds": [type(error).__name__], "text": str(error)}}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
