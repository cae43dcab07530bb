"""A pretend NVIDIA driver: an `nvidia-smi` first on the PATH that lists what a test says.

Neighbours: `runtime/fitness.py` asks it as it asks the real one.
"""

from __future__ import annotations

from pathlib import Path

from runtime.nvidia_smi import _FIELDS

H100 = "NVIDIA H100 80GB HBM3, 580.95.05, 81559, 9.0, Disabled"
A100_40 = "NVIDIA A100-SXM4-40GB, 580.95.05, 40960, 8.0, Disabled"


class Driver:
    """`folder` is for the PATH. A line names what the fields are up to `mig.mode.current`, or all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def lists(self, *lines: str, code: int = 0, stderr: str = "") -> None:
        """Have nvidia-smi say these, each GPU with a UUID of its own and all of its memory free."""
        tool = self.folder / "nvidia-smi"
        said = "".join(f"echo '{_whole(line, index)}'\n" for index, line in enumerate(lines))
        tool.write_text(
            f"#!/bin/sh\n{said}" + (f"echo '{stderr}' >&2\n" if stderr else "") + f"exit {code}\n"
        )
        tool.chmod(0o755)


def uuid(index: int) -> str:
    """That of the GPU with this number."""
    return f"GPU-0000000{index}-1111-2222-3333-444444444444"


def _whole(line: str, index: int) -> str:
    missing = len(_FIELDS) - len(line.split(","))
    return f"{line}, {uuid(index)}, 1" if missing == 2 else line
