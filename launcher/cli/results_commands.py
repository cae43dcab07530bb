"""The verbs about a run's results: their options and help; `commands.py` registers them.

Each verb imports its implementation when called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launcher.cli import options


def export(
    context: typer.Context,
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="The run's name or id; RUN@7 for its step 7, RUN@best for the best one.",
            autocompletion=options.run_names,
            show_default=False,
        ),
    ],
    to: Annotated[str, typer.Option(metavar="DIR", help="A new folder for it.", show_default=False)],
    merge: Annotated[
        bool, typer.Option("--merge", help="A whole model: the adapter merged into its base.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="With --merge: float32, bfloat16 or float16. Default: the run's."),
    ] = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Write a run's result into a folder: its adapter in PEFT format, or a merged model."""
    from launcher.cli import export_verb

    invocation = context.obj
    return export_verb.export(invocation.output, run, to, merge, dtype, invocation.env_file)


def report(
    context: typer.Context,
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME", help="The runs' names or ids.", autocompletion=options.run_names),
    ],
    to: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Write it here: a new folder, or a plot as .png, .svg or .pdf."),
    ] = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Write a run's page as a folder, or several runs side by side, from the files on this computer."""
    from launcher.cli import report_verb

    return report_verb.report(context.obj.output, names, to)


def open(  # noqa: A001 - the verb's name
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="The run's name or id. Without one: all runs, to choose and to compare.",
            autocompletion=options.run_names,
            show_default=False,
        ),
    ] = None,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Print the page's address and open nothing.")
    ] = False,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Open a run's page in the browser: live while it lives, then as plain files."""
    from launcher.cli import open_verb

    return open_verb.open_page(context.obj.output, name, not no_browser)
