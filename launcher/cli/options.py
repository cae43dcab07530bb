"""The options of a run: each one's flag, its help, and the group of `--help` it stands in.

Neighbours: `commands.py` gives them to `launch` itself and to `launch plan`; what their text means is in
`settings.py`. Knows nothing of values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_WHAT, _MONEY, _LIFETIME, _OUTPUT = "What to run", "Money", "Lifetime", "Output"


def run_names(incomplete: str) -> list[str]:
    """The names and ids of the recorded runs, for the shell's completion."""
    from launcher.base.home import Home
    from launcher.ledger.records import RecordStore

    words = [word for record in RecordStore(Home.find()).list() for word in (record.name, record.id) if word]
    return [word for word in words if word.startswith(incomplete)]


# ------------------------------------------------------------------ what to run

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
    typer.Option(metavar="NAME", help="A name for the run, instead of its id.", rich_help_panel=_WHAT),
]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="RUN",
        help="Take up a run that ended or was killed: its name or id. Without -- its own program runs.",
        rich_help_panel=_WHAT,
        autocompletion=run_names,
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE:COUNT",
        help="Rent GPUs, such as H100:4, for the length of the run; H100 is one. Without it the run is here.",
        rich_help_panel=_WHAT,
    ),
]
Infra = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PLACE",
        help="Where: aws, aws/us-east-1, k8s/CONTEXT, ssh/POOL, slurm, …; several with commas, the cheapest "
        "is tried first. Default: every cloud you have an account with.",
        rich_help_panel=_WHAT,
    ),
]
TrainGpus = Annotated[
    str | None,
    typer.Option(
        metavar="COUNT",
        help="GPUs that train. Default: a quarter, at least one; a single GPU does both.",
        rich_help_panel=_WHAT,
    ),
]
InferGpus = Annotated[
    str | None,
    typer.Option(metavar="COUNT", help="GPUs that serve. Default: the others.", rich_help_panel=_WHAT),
]
Disk = Annotated[
    str | None,
    typer.Option(
        metavar="GB", help="The rented machine's disk. Default: by the model's size.", rich_help_panel=_WHAT
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting of the runtime, such as train.learning_rate=2e-3. Repeat it for more.",
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
        help="Set OPENAI_BASE_URL and OPENAI_API_KEY for the program as well.",
        rich_help_panel=_WHAT,
    ),
]
EnvFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Secrets and ids. Default: .env in this folder.", rich_help_panel=_WHAT
    ),
]

# ------------------------------------------------------------------ money

Budget = Annotated[
    str | None,
    typer.Option(
        metavar="DOLLARS",
        help="End the run when it has cost so much. With --gpus: here a run costs nothing.",
        rich_help_panel=_MONEY,
    ),
]
MaxPrice = Annotated[
    str | None,
    typer.Option(
        metavar="DOLLARS", help="Rent nothing that costs more than this an hour.", rich_help_panel=_MONEY
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Show where it would run, at what price, and the most it can cost; start nothing.",
        rich_help_panel=_MONEY,
    ),
]
Yes = Annotated[
    bool | None,
    typer.Option("--yes", "-y", help="Do not ask before money is spent.", rich_help_panel=_MONEY),
]

# ------------------------------------------------------------------ lifetime

Maximum = Annotated[
    str | None,
    typer.Option(
        "--max",
        metavar="TIME",
        help="The deadline: 90s, 15m, 4h. Default: none here; 4h on rented GPUs without a budget.",
        rich_help_panel=_LIFETIME,
    ),
]
Lease = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="End when this computer was silent for so long: 15s or more. Default: 15m.",
        rich_help_panel=_LIFETIME,
    ),
]
Idle = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="A rented machine ends itself so long after nothing keeps it. Default: 10m.",
        rich_help_panel=_LIFETIME,
    ),
]

Grace = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="What the program has to save its own work after Ctrl-C, or when the run is ended. Default: 5s.",
        rich_help_panel=_LIFETIME,
    ),
]

CopyRate = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        help="How fast checkpoints come home while a rented run works, such as 2MB/s; none: no bound. "
        "Default: half of what the line carries.",
        rich_help_panel=_LIFETIME,
    ),
]

# ------------------------------------------------------------------ output

Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="One JSON object a line on stdout; what a program prints goes to stderr.",
        rich_help_panel=_OUTPUT,
    ),
]
KeepOutput = Annotated[
    bool | None,
    typer.Option(
        "--keep-output/--no-keep-output",
        help="Keep what the program prints, for `launch logs RUN --which program`. Without it the program "
        "writes to the terminal itself, as full-screen programs need. Default: kept.",
        rich_help_panel=_OUTPUT,
    ),
]
Plain = Annotated[
    bool, typer.Option("--plain", help="No live line, only plain lines.", rich_help_panel=_OUTPUT)
]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=_OUTPUT)
]
Version = Annotated[bool, typer.Option("--version", help="Show the version.", rich_help_panel=_OUTPUT)]
