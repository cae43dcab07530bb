"""A user's program that leaves a file where the run's logs would come home to."""

import os
from pathlib import Path

Path(os.environ["LAUNCH_RUN_DIR"], "logs").write_text("")
