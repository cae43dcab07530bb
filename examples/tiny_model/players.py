"""Make the tiny player: `python -m examples.tiny_model.players --out DIR`, in a minute.

A Qwen2 of a few hundred thousand parameters learns by imitation to answer the boards of `boards.py` with a
move that is allowed, about as a crowd would that chooses at random: a first policy that a reward can improve.
Neighbours: `make.py` has the embedded model, whose chat template and kind of tokenizer this one has too. A
model in DIR that was made of the same sources is left as it is. Run outside the runtime's environment, it
continues inside it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = ("boards.py", "imitation.py", "make.py")
FIGURES = "FIGURES.json"
# In each environment that `runtime.bootstrap` has built.
MARKER = "environment.json"
# A module of ours in another environment: the packages that are found first are that environment's own.
_ALONE = (
    "-I",
    "-c",
    f"import runpy, sys; sys.path.append({str(HERE.parents[1])!r}); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)",
)


def digest() -> str:
    """The digest of everything that decides the result."""
    return hashlib.sha256(b"\0".join((HERE / name).read_bytes() for name in SOURCES)).hexdigest()[:16]


def is_made(folder: Path) -> bool:
    """Whether the folder has the result of these sources; its figures are written last."""
    try:
        return json.loads((folder / FIGURES).read_text())["made_of"] == digest()
    except (OSError, ValueError, KeyError):
        return False


def make_in_this_environment(folder: Path) -> None:
    """Make it; the runtime's environment has the packages for that."""
    from examples.tiny_model import imitation

    made_of = digest()
    figures = imitation.make(folder) | {"made_of": made_of}
    (folder / FIGURES).write_text(json.dumps(figures, indent=2) + "\n")


def make_in_the_runtimes(folder: Path) -> None:
    """Make it in the environment that `launch` keeps, which is built first if there is none yet."""
    bootstrap_args = ["runtime.bootstrap", "--variant", "cpu", "--root", str(environments())]
    built = subprocess.run([sys.executable, *_ALONE, *bootstrap_args], stdout=subprocess.PIPE, text=True)
    if built.returncode:
        raise SystemExit(built.returncode)  # it has reported the reason
    python = built.stdout.splitlines()[-1]
    above = {**os.environ, "OMP_NUM_THREADS": "1"}
    taught = [python, *_ALONE, "examples.tiny_model.players", "--out", str(folder)]
    if failed := subprocess.run(taught, env=above, stdout=sys.stderr).returncode:
        raise SystemExit(failed)


def is_the_runtimes(environment: Path) -> bool:
    """Whether `runtime.bootstrap` has built it: another may have a torch of its own, and no more."""
    return (environment / MARKER).is_file()


def environments() -> Path:
    """Where `launch` keeps them."""
    if home := os.environ.get("LAUNCH_HOME"):
        return Path(home).expanduser().absolute() / "cache" / "environments"
    import platformdirs  # comes with `launch`, and is asked only there

    return Path(platformdirs.user_cache_dir("slipway", appauthor=False)) / "environments"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tiny player of the examples' games.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    folder = parser.parse_args().out.absolute()
    if not is_made(folder):
        inside = is_the_runtimes(Path(sys.prefix))
        (make_in_this_environment if inside else make_in_the_runtimes)(folder)
    print(folder)


if __name__ == "__main__":
    main()
