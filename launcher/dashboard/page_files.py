"""The page's static files, and their content types and security headers.

Neighbours: `proxy/page_routes.py` serves them, `page_folder.py` copies them. `static/ORIGIN` has the source
of those by other authors. Knows nothing of runs.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).resolve().parent / "static"
INDEX = "index.html"
# In the order that the page loads them; `index.html` names them.
NAMES = (
    INDEX, "uPlot.iife.min.js", "uPlot.min.css", "page.css", "loading.js", "shown.js", "drawing.js",
    "charts.js", "reading.js", "rollouts.js", "runs.js", "logs.js", "tables.js", "page.js",
)  # fmt: skip
LICENCE = "uPlot.LICENSE"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
# Nothing from elsewhere, nothing inline, no frame around it.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def as_json(value: Any) -> bytes:
    """A piece of data as the page reads it. Lone surrogates, which no UTF-8 has, become a question mark, and
    numbers that are none become null."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(value), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="replace")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(it) for name, it in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(it) for it in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(name: str) -> bytes:
    """One of `NAMES`, or the licence."""
    return (_FOLDER / name).read_bytes()
