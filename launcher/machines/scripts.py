"""What runs on a rented machine: the task it is launched with; setting up and serving, as text.

Neighbours: `cloud.py` hands these to `remote_job.py`; what they run, `runtime/fitness.py`, `bootstrap.py`
and `keeper.py`, is in `CODE`, the folder that `push` filled. No secret is in them. Knows nothing of how they
get there.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path

from runtime.fitness import Needs

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
root={environments}
mkdir -p "$root"
"$python" -m runtime.fitness --root "$root" {needs}
"$python" -m runtime.bootstrap --variant {variant} --root "$root" > {python}.new
mv {python}.new {python}
"""
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


def setup(state_dir: str, needs: Needs) -> str:
    """See that the machine is fit for the run, then build the environment or find it built."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(needs).items()]
    return _SETUP.format(
        environments=ENVIRONMENTS,
        needs=shlex.join(words),
        variant=needs.variant,
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
