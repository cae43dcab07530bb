"""A program under `launch --arbor` that knows nothing of launch: `use_arbor.py RESULT KEYS…`.

Asks the run with each key, in hexadecimal so that it stands in no command line, and leaves in the file RESULT
which `arbor` it imported and what it was answered.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path

import arbor  # under `launch --arbor` it is on the path

PORT = os.environ["LAUNCH_BASE_URL"].rpartition(":")[2]


def ask(key: str) -> int:
    headers = {"Authorization": f"Bearer {key}", "X-Api-Key": key, "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/chat/completions", b"{}", headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.status


found = {
    "arbor": arbor.__file__,
    "path": os.environ["PYTHONPATH"].split(os.pathsep),
    "answers": [ask(bytes.fromhex(key).decode()) for key in sys.argv[2:]],
}
Path(sys.argv[1]).write_text(json.dumps(found))
