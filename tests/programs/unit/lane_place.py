"""Takes a place among `argv[2]` in the folder `argv[1]`, says its number, and has it until its input ends."""

import sys
from pathlib import Path

from tests.support.places import take

print(take(Path(sys.argv[1]), int(sys.argv[2])), flush=True)
sys.stdin.read()
