"""The shell scripts that run on a rented machine: the launch task, the set-up, the serving.

Neighbours: `cloud_machine.py` hands these to `remote_job.py`. They run `runtime/fitness.py`, `bootstrap.py`
and `keeper.py` from `CODE`, the folder that `push` filled. They contain no secret: secrets come on the job's
stdin, through a pipe, so none is ever in a file there. Knows nothing of how they get there.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict

from runtime.fitness import Needs
from runtime.shared import wandb_signals

# Below the home of the machine's user.
CODE = "slipway-code"
MODELS = "slipway-models"
ENVIRONMENTS = "~/.cache/slipway/environments"
# Files in the run's folder there: the path of the environment's python; the keeper's exit code.
PYTHON = "python"
EXIT = "exit"

# Tests whether a machine's own Python can be used; for CUDA with its headers, because kernels are built with
# them (fitness.py).
_PYTHON_WILL_DO = """import os, sys, sysconfig
header = sysconfig.get_path("include", "posix_prefix") + "/Python.h"
sys.exit(sys.version_info < (3, 11) or "{variant}" == "cuda" and not os.path.exists(header))"""
# A proxy of the user's that this machine cannot reach stands in the way of every download.
_UNSET_UNREACHABLE = 'unset $("$python" -m runtime.unreachable_proxies)'
# The last line of its output has the error. Its stdin has variables: the user's proxies.
_SETUP = """
set -e
export PATH="$HOME/.local/bin:$PATH"
python=$(command -v python3)
while IFS= read -r variable; do export "$variable"; done
{unset_unreachable}
if ! "$python" -c '{will_do}'; then
  uv python install 3.12
  python=$(uv python find 3.12)
fi
root={environments}
mkdir -p "$root"
"$python" -m runtime.fitness --root "$root" {needs}
"$python" -m runtime.bootstrap --variant {variant} --root "$root" > {python}.new
mv {python}.new {python}
"""
# It runs itself again under `runtime.metadata_shield`, out of reach of the machine's metadata service. Only
# that second process reads the secrets. `export` and `read` are the shell's own, so no secret is in a command
# line. The supervisor hands each child its part.
_SERVE = """
cd {state}
code=~/{code}
python=$(cat {python})
export PYTHONPATH="$code" PATH="$(dirname "$python"):$PATH"
if [ $# = 0 ]; then
  "$python" -m runtime.metadata_shield -- bash "$0" shielded
  ended=$?
  echo $ended > {exit}
  exit $ended
fi
IFS= read -r token
while IFS= read -r variable && [ -n "$variable" ]; do export "$variable"; done
{unset_unreachable}
while IFS= read -r secret; do export "$secret"; done
exec "$python" -m runtime.keeper --config {state}/runtime.json --autodown \\
  < <(printf '%s\\n' "$token") >> logs/keeper.log 2>&1
"""
# Where the trainer has such a run: asked to end it, and waited for.
_CLOSE_WANDB = """
cd {state} && test -e {opened} && ! test -e {exit} || exit 0
touch {close}
looks=0
while test -e {opened} && ! test -e {exit}; do
  looks=$((looks + 1))
  if [ $looks -gt {most} ]; then exit 1; fi
  sleep 0.2
done
"""


def setup(state_dir: str, needs: Needs) -> str:
    """See that the machine is fit for the run, then build the environment or find it built."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(needs).items()]
    return _SETUP.format(
        environments=ENVIRONMENTS,
        unset_unreachable=_UNSET_UNREACHABLE,
        needs=shlex.join(words),
        variant=needs.variant,
        will_do=_PYTHON_WILL_DO.format(variant=needs.variant),
        python=shlex.quote(f"{state_dir}/{PYTHON}"),
    )


def serve(state_dir: str) -> str:
    """Run the keeper to its end, with `stdin_text` on its stdin."""
    return _SERVE.format(
        state=shlex.quote(state_dir),
        code=CODE,
        python=PYTHON,
        exit=EXIT,
        unset_unreachable=_UNSET_UNREACHABLE,
    )


def close_wandb(state_dir: str, seconds: float) -> str:
    """Ask the trainer to end its Weights & Biases run, and wait for so long; the script fails if it is not
    ended then."""
    return _CLOSE_WANDB.format(
        state=shlex.quote(state_dir),
        opened=wandb_signals.OPEN,
        close=wandb_signals.CLOSE,
        exit=EXIT,
        most=int(5 * seconds),
    )


def stdin_text(token: str, secrets: Mapping[str, str], variables: Mapping[str, str]) -> bytes:
    """The stdin of `serve`: the run's token, the variables, an empty line, and the runtime's secrets."""
    return f"{token}\n".encode() + variables_text(variables) + b"\n" + variables_text(secrets)


def variables_text(variables: Mapping[str, str]) -> bytes:
    """Variables, a line each: the stdin of `setup`."""
    return "".join(f"{name}={value}\n" for name, value in variables.items()).encode()
