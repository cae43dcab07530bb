"""An engine as it is shipped, but that its workers say the hash of the base (hashed_worker.py).

python -m tests.runtime.hashed_engine --config runtime.json
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from runtime.engine import command, server
from runtime.shared.runtime_config import RuntimeConfig


def main() -> None:
    """`server.main`, with the environment it would give itself."""
    if server.ENVIRONMENT_MARK not in os.environ:
        config = RuntimeConfig.model_validate_json(Path(sys.argv[2]).read_text())
        environ = os.environ | command.environment(config, 0) | {server.ENVIRONMENT_MARK: "1"}
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.runtime.hashed_engine", *sys.argv[1:]], environ
        )
    command.WORKER_EXTENSION = "tests.runtime.hashed_worker.HashedWorker"
    server.main()


if __name__ == "__main__":
    main()
