"""The table of GPUs' memory, by the name that a GPU is rented under.

Neighbours: `memory/` plans with it, `fitness.py` compares a rented machine with it. Pure.

MiB as nvidia-smi lists them (memory.total), collected from owners' published listings, 2026-11-25; none was
read by the authors. A machine's driver is asked for the real memory before the long install.
"""

from __future__ import annotations

import re

MIB = 2**20
# A GPU that is called 80GB has 81,559 MiB: the number in a name is rounded.
_ROUNDED = 0.1
# By SkyPilot's name, without the parts for its form (H100-SXM, H100-MEGA-80GB).
TABLE_MIB = {
    "A10": 23028,
    "A10G": 23028,
    "L4": 23034,
    "RTX3090": 24576,
    "RTX4090": 24564,
    "RTX5090": 32607,
    "A100": 40960,
    "A40": 46068,
    "L40": 46068,
    "L40S": 46068,
    "A6000": 49140,
    "RTXA6000": 49140,
    "RTX6000-ADA": 49140,
    "A100-80GB": 81920,
    "H100": 81559,
    "H100-NVL": 95830,
    "RTXPRO6000": 97887,
    "H200": 143771,
    "B200": 183359,
    "B300": 275040,
}
# The parts of a name for a GPU's form, which do not change its memory.
_FORM = re.compile(r"-(SXM\d*|PCIE|MEGA|SERVER)(?=-|$)", re.IGNORECASE)
# A type with this in its name has so much; in GH200-480GB it is the computer's own memory.
_NAMED = re.compile(r"-(\d+)GB?\b", re.IGNORECASE)


def memory_bytes(gpu: str) -> int | None:
    """The memory of a GPU of this name; None if neither the table nor the name tells it."""
    plain = _FORM.sub("", gpu.upper())
    known = TABLE_MIB.get(plain)
    if known is None and named_bytes(gpu):
        kind = TABLE_MIB.get(_NAMED.sub("", plain), 0) * MIB
        return kind if abs(kind - named_bytes(gpu)) < _ROUNDED * kind else named_bytes(gpu)
    return None if known is None else known * MIB


def named_bytes(gpu: str) -> int:
    """The "80GB" of a type's name; 0 if it has none."""
    named = _NAMED.search(gpu)
    return int(named.group(1)) * 10**9 if named and not gpu.upper().startswith("G") else 0
