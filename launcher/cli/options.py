"""The options of a run: each one's flag, its help, and its group in `--help`.

Neighbours: `commands.py` gives them to `launch` itself and to `launch plan`; `settings.py` parses their text.
Knows nothing of values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_WHAT, _MONEY, _LIFETIME, _OUTPUT = "What to run", "Money", "Lifetime", "Output"


def run_names(incomplete: str) -> list[str]:
    """The names and ids of the recorded runs, for the shell's completion."""
    from launcher.base.home import Home
    from launcher.records.records import RecordStore

    words = [word for record in RecordStore(Home.find()).list() for word in (record.name, record.id) if word]
    return [word for word in words if word.startswith(incomplete)]


# ------------------------------------------------------------------ program and model

Model = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="What to train: a hub name, a model's or adapter's folder, or `tiny`, which comes with launch.",
        rich_help_panel=_WHAT,
    ),
]
Name = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="A name for the run, to use instead of its id.", rich_help_panel=_WHAT),
]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="RUN",
        help="Resume a run that ended or was killed, by name or id. Without --, its own program runs.",
        rich_help_panel=_WHAT,
        autocompletion=run_names,
    ),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="RUN",
        help="Start from an earlier run's adapter: RUN, RUN@7 for its step 7, RUN@best.",
        rich_help_panel=_WHAT,
        autocompletion=run_names,
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE:COUNT",
        help="Rent GPUs for this run, such as H100:4; H100 means one. local:2: two of this computer's own. "
        "Default: run on this computer's CPU.",
        rich_help_panel=_WHAT,
    ),
]
Infra = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PLACE",
        help="Where to rent: aws, aws/us-east-1, k8s/CONTEXT, ssh/POOL, slurm, … With several (commas), "
        "the cheapest is tried first. Default: every cloud you have an account with.",
        rich_help_panel=_WHAT,
    ),
]
TrainGpus = Annotated[
    str | None,
    typer.Option(
        metavar="COUNT",
        help="GPUs for training. Default: a quarter of them, at least one. A single GPU does both.",
        rich_help_panel=_WHAT,
    ),
]
InferGpus = Annotated[
    str | None,
    typer.Option(metavar="COUNT", help="GPUs for inference. Default: the rest.", rich_help_panel=_WHAT),
]
Disk = Annotated[
    str | None,
    typer.Option(
        metavar="GB", help="The rented machine's disk. Default: fits the model.", rich_help_panel=_WHAT
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a runtime setting, such as train.learning_rate=2e-3. Repeat it for more.",
        rich_help_panel=_WHAT,
    ),
]
Wandb = Annotated[
    str | None,
    typer.Option(
        metavar="MODE",
        help="Log to Weights & Biases: online, offline or disabled.",
        rich_help_panel=_WHAT,
    ),
]
Trackio = Annotated[
    bool | None,
    typer.Option(
        "--trackio/--no-trackio",
        help="Log to Trackio on this computer: into results/trackio, or your TRACKIO_DIR. Needs the extra "
        "`trackio`.",
        rich_help_panel=_WHAT,
    ),
]
Port = Annotated[
    str | None,
    typer.Option(
        metavar="PORT",
        help="The endpoint's port on 127.0.0.1. Default: 7453, or the next free one.",
        rich_help_panel=_WHAT,
    ),
]
OpenaiEnv = Annotated[
    bool | None,
    typer.Option(
        "--openai-env",
        help="Also set OPENAI_BASE_URL and OPENAI_API_KEY for your program.",
        rich_help_panel=_WHAT,
    ),
]
Arbor = Annotated[
    bool | None,
    typer.Option(
        "--arbor",
        help="Serve programs written for Arbor as they are: `import arbor` is ours, and on Linux your own "
        "programs need no key. Port 7453, or --port.",
        rich_help_panel=_WHAT,
    ),
]
Art = Annotated[
    bool | None,
    typer.Option(
        "--art",
        help="For programs written for OpenPipe's ART that have our backend: on Linux your own programs need "
        "no key. Port 7453, or --port.",
        rich_help_panel=_WHAT,
    ),
]
EnvFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="File with secrets and ids. Default: .env in this folder.", rich_help_panel=_WHAT
    ),
]

# ------------------------------------------------------------------ money

Budget = Annotated[
    str | None,
    typer.Option(
        metavar="DOLLARS",
        help="Stop when the run has cost this much, over all its lives. "
        "Needs --gpus: a run on this computer is free.",
        rich_help_panel=_MONEY,
    ),
]
MaxPrice = Annotated[
    str | None,
    typer.Option(
        metavar="DOLLARS", help="Do not rent anything above this price per hour.", rich_help_panel=_MONEY
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Show where it would run, the price and the maximum cost. Starts nothing.",
        rich_help_panel=_MONEY,
    ),
]
Yes = Annotated[
    bool | None,
    typer.Option("--yes", "-y", help="Do not ask before spending money.", rich_help_panel=_MONEY),
]

# ------------------------------------------------------------------ lifetime

Maximum = Annotated[
    str | None,
    typer.Option(
        "--max",
        metavar="TIME",
        help="Stop after this long: 90s, 15m, 4h. Default: 4h for rented GPUs without a budget, else none.",
        rich_help_panel=_LIFETIME,
    ),
]
Lease = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Stop if this computer gives no sign of life for this long. At least 15s. Default: 15m.",
        rich_help_panel=_LIFETIME,
    ),
]
Idle = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="A rented machine shuts itself down after this long idle, and a run whose program failed before "
        "its first step ends after this long without a key. Default: 10m.",
        rich_help_panel=_LIFETIME,
    ),
]

Grace = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="How long your program has to save its work after Ctrl-C or when the run stops. Default: 5s.",
        rich_help_panel=_LIFETIME,
    ),
]

CopyRate = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        help="Limit for copying checkpoints to this computer during a rented run: 2MB/s, or none. "
        "Default: half of your bandwidth.",
        rich_help_panel=_LIFETIME,
    ),
]

# ------------------------------------------------------------------ output

Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON object per line on stdout; your program's output goes to stderr.",
        rich_help_panel=_OUTPUT,
    ),
]
KeepOutput = Annotated[
    bool | None,
    typer.Option(
        "--keep-output/--no-keep-output",
        help="Save your program's output for `launch logs RUN --which program`. With --no-keep-output it "
        "writes straight to the terminal, as full-screen programs need. Default: save it.",
        rich_help_panel=_OUTPUT,
    ),
]
Plain = Annotated[
    bool, typer.Option("--plain", help="Print plain lines, no live line.", rich_help_panel=_OUTPUT)
]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show the traceback if there is an error.", rich_help_panel=_OUTPUT)
]
Version = Annotated[bool, typer.Option("--version", help="Show the version.", rich_help_panel=_OUTPUT)]
