"""The entry point of `launch`: splits the command line, and turns every error into three lines and an exit
code.

Neighbours: `commands.py` has the options and their help, `output.py` prints, `errors.py` has the codes.
Imports nothing heavy before the first words are out: typer alone takes 0.1 s.
"""

from __future__ import annotations

import os
import sys

from launcher.base.errors import EXIT_INTERRUPTED, PreflightError, as_launch_error

_OLDEST_PYTHON = (3, 11)
# A command line with one of these does not start a run.
_NO_RUN = frozenset(
    {"plan", "status", "logs", "ssh", "exec", "push", "pull", "report", "export", "open", "down", "gc"}
    | {"doctor", "bench", "env", "config"}
    | {"--help", "-h", "--version", "--dry-run", "--json", "--plain"}
    | {"--install-completion", "--show-completion"}
)


def main(argv: list[str] | None = None) -> int:
    """The console script. Returns the exit code; `python -m launcher.cli.main` is the same."""
    if refusal := unsupported(sys.version_info[:2], sys.platform):
        sys.stderr.write(f"Error: {refusal.message}\n  {refusal.why}\nHint: {refusal.hint}\n")
        return refusal.exit_code
    words = sys.argv[1:] if argv is None else argv
    own, command = split(words or ["--help"])
    _print_first_line(own)
    code = _dispatch(own, command)
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # `launch … | head`: Python would complain again when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return code


def unsupported(python: tuple[int, ...], platform: str) -> PreflightError | None:
    """The reason that Slipway does not work here. Checked before imports that would fail with a worse
    message."""
    if python < _OLDEST_PYTHON:
        found, least = (".".join(map(str, version)) for version in (python, _OLDEST_PYTHON))
        return PreflightError(
            f"launch needs Python {least} or newer, this is {found}",
            f"it runs under {sys.executable}",
            "uv tool install --python 3.12 slipway-rl",
        )
    if platform == "win32":
        return PreflightError(
            "launch does not run on Windows", "it needs Linux, or macOS for rented machines", "wsl --install"
        )
    return None


def split(words: list[str]) -> tuple[list[str], list[str] | None]:
    """Our own arguments, and the user's command behind `--`: None without a `--`."""
    if "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _print_first_line(own: list[str]) -> None:
    """Print one line at once, so that the user sees that the run was understood; `output.py` soon draws
    over it."""
    is_run = _NO_RUN.isdisjoint(own) and "_LAUNCH_COMPLETE" not in os.environ
    if is_run and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        sys.stderr.write("launch: checking this computer\r")
        sys.stderr.flush()


def _dispatch(own: list[str], command: list[str] | None) -> int:
    from launcher.cli.commands import invoke
    from launcher.cli.invocation import Invocation
    from launcher.cli.typed_line import TypedLine
    from launcher.config import import_shadowing
    from launcher.console.output import Output

    typed = TypedLine(tuple(own), None if command is None else tuple(command))
    output = Output(
        as_json="--json" in own,
        plain="--plain" in own,
        complete_hint=typed.complete,
    )
    try:
        return invoke(own, Invocation(command, output, started_by=typed.started_by()))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the outermost boundary: a bug gets three lines and code 1
        _hide_secrets()
        output.traceback(show="--debug" in own)
        failure = import_shadowing.shadowed_import(error) or as_launch_error(error)
        output.error(failure)
        return failure.exit_code


def _hide_secrets() -> None:
    """Hide the environment's secrets, because an error may quote them."""
    from launcher.base.credentials import hide_secrets_of

    hide_secrets_of(os.environ)


if __name__ == "__main__":
    sys.exit(main())
