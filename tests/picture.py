"""The quickstart in a terminal, as a picture: `python -m tests.picture`, in some minutes.

Runs `launch -- python examples/quickstart.py` in a terminal of its own and keeps what stays on its screen.
Writes the picture `examples/demo.svg` and the run's own reward curve, `examples/quickstart.png`. Most steps,
and notes on single rollouts, are left out where `...` stands, and the home folder is `~`; no other word is
changed.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import struct
import sys
import termios
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from tests.support.environment import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
COMMAND = ["launch", "--", "python", "examples/quickstart.py"]
ROWS, COLUMNS = 60, 108
LEFT_OUT = "..."

# The line that is drawn again and again (`launcher/console/terminal.py`): pinned, or until it is cleared.
_PINNED = re.compile(r"\x1b7.*?\x1b8(?:\x1b\[1A)?", re.DOTALL)
_CLEARED = re.compile(r".*\r\x1b\[2K")
_STYLE = re.compile(r"\x1b\[[\d;]*m")
_OTHER_SEQUENCE = re.compile(r"\x1b\[[\d;]*[A-Za-ln-z]")
_RESULTS = re.compile(r"^  results\s+(\S+)$", re.MULTILINE)
_STEP = re.compile(r"grpo: step (\d+)/(\d+) ")
_NOTE = "grpo: a rollout ended "
# A font from elsewhere: a picture asks nobody for anything.
_FONT = re.compile(r"@font-face \{\{.*?\}\}\n", re.DOTALL)


def recorded(command: list[str]) -> bytes:
    """All that a command writes to a terminal of ROWS × COLUMNS. Raises SystemExit where it fails."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    written = b""
    try:
        while piece := os.read(terminal, 65536):
            written += piece
            sys.stdout.buffer.write(piece)
            sys.stdout.flush()
    except OSError:  # how Linux says that nobody writes to it any more
        pass
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise SystemExit(f"{' '.join(command)} ended with {code}")
    return written


def lasting(written: str) -> list[str]:
    """The lines that stay on the screen, with their colours."""
    text = _PINNED.sub("", written.replace("\r\n", "\n"))
    lines = [_OTHER_SEQUENCE.sub("", _CLEARED.sub("", line)).rstrip() for line in text.split("\n")]
    return [line for line in lines if _STYLE.sub("", line).strip(" \r")]


def shortened(lines: list[str]) -> list[str]:
    """Without what is said of single rollouts, and of the steps but the first two and the last."""
    kept: list[str] = []
    for line in lines:
        step = _STEP.match(line)
        middle = step is not None and 2 < int(step[1]) < int(step[2])
        if not middle and not line.startswith(_NOTE):
            kept.append(line)
        elif kept[-1] != LEFT_OUT:
            kept.append(LEFT_OUT)
    return kept


def drawn(lines: list[str]) -> str:
    """The lines as a terminal shows them, in SVG."""
    with Path(os.devnull).open("w") as nowhere:
        console = Console(
            record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor"
        )
        for line in lines:
            console.print(Text.from_ansi(line), highlight=False)
    return console.export_svg(
        title="launch", code_format=_FONT.sub("", CONSOLE_SVG_FORMAT), unique_id="quickstart"
    )


def main() -> None:
    screen = recorded(COMMAND).decode().replace(str(Path.home()), "~")
    lines = [f"$ {' '.join(COMMAND)}", *shortened(lasting(screen))]
    text = "\n".join(_STYLE.sub("", line) for line in lines)
    results = _RESULTS.search(text)
    if results is None:
        raise SystemExit("the run does not say where its results are")
    (EXAMPLES / "demo.svg").write_text(drawn(lines))
    shutil.copy(Path(results[1]).expanduser() / "reward.png", EXAMPLES / "quickstart.png")


if __name__ == "__main__":
    main()
