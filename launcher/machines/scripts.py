"""What runs on a rented machine: the task it is launched with; setting up and serving, as text.

Neighbours: `cloud.py` hands these to `remote_job.py`; `runtime/bootstrap.py` and `runtime/keeper.py` are what
they run, both in `CODE`, the folder that `push` filled. No secret is in them. Knows
nothing of how they get there.
"""

from __future__ import annotations

import shlex
from pathlib import Path

# Below the home of the machine's user.
CODE = "slipway-code"
MODELS = "slipway-models"
ENVIRONMENTS = "~/.cache/slipway/environments"
# In the run's folder there: the environment's python; the run's token and the runtime's secrets, which go
# when they are read; what the keeper ended with.
PYTHON = "python"
TOKEN = "token"
SECRETS = "secrets"
EXIT = "exit"

# What is wrong is said in the last line.
_SETUP = """
set -e
export PATH="$HOME/.local/bin:$PATH"
python=$(command -v python3)
if ! "$python" -c "import sys; sys.exit(sys.version_info < (3, 11))"; then
  uv python install 3.12
  python=$(uv python find 3.12)
fi
if [ {gpus} -gt 0 ]; then
  found=$(nvidia-smi -L | wc -l)
  [ "$found" -ge {gpus} ] || {{ echo "{gpus} GPUs were rented, $found are there"; exit 1; }}
fi
root={environments}
mkdir -p "$root"
if ! "$python" -c '{is_ready}' "$root"; then
  free=$(df -k --output=avail "$root" | tail -1)
  [ "$free" -ge {needed_kilobytes} ] || {{ echo "the disk is too small: $free kB are free"; exit 1; }}
fi
"$python" -m runtime.bootstrap --variant {variant} --root "$root" > {python}.new
mv {python}.new {python}
"""
_IS_READY = (
    "import sys; from pathlib import Path; from runtime import bootstrap; "
    'sys.exit(not bootstrap.is_ready(Path(sys.argv[1]), "{variant}"))'
)
# Token and secrets are off the disk before anything else starts; `export` and `read` are the shell's own, so
# that neither is in a command line. The supervisor hands each child its part.
_SERVE = """
cd {state}
exec 3< {token}
rm {token}
if [ -f {secrets} ]; then
  exec 4< {secrets}
  rm {secrets}
  while IFS= read -r secret <&4; do export "$secret"; done
  exec 4<&-
fi
code=~/{code}
python=$(cat {python})
export PYTHONPATH="$code" PATH="$(dirname "$python"):$PATH"
"$python" -m runtime.keeper --config {state}/runtime.json --autodown <&3 >> logs/keeper.log 2>&1 3<&-
ended=$?
echo $ended > {exit}
exit $ended
"""


def setup(state_dir: str, variant: str, gpus: int) -> str:
    """Count the GPUs (0: none are needed), look at the disk, build the environment or find it built."""
    from runtime.bootstrap import NEEDED_BYTES

    return _SETUP.format(
        gpus=gpus,
        environments=ENVIRONMENTS,
        is_ready=_IS_READY.format(variant=variant),
        needed_kilobytes=NEEDED_BYTES[variant] // 1024,
        variant=variant,
        python=shlex.quote(f"{state_dir}/{PYTHON}"),
    )


def serve(state_dir: str) -> str:
    """Run the keeper to its end, with the token and the secrets that were written for it."""
    return _SERVE.format(
        state=shlex.quote(state_dir),
        token=TOKEN,
        secrets=SECRETS,
        code=CODE,
        python=PYTHON,
        exit=EXIT,
    )


def task_file(name: str) -> Path:
    """A task file: in the installed package, or in the checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "sky" / name
    return installed if installed.exists() else package.parent / "sky" / name
