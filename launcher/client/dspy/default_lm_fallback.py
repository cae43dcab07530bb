"""Makes the run's policy the default LM if DSPy has none configured: DSPy's prompt optimizers drop a
program's own LM and use the default.

Neighbours: `lm.py` offers each LM that a program makes, `programs.py` gives its settings to a predictor that
has lost its own. The user's configuration always takes precedence. Knows nothing of programs or HTTP.
"""

from __future__ import annotations

import sys
from typing import Any

# DSPy's own `configure` would make this thread the only one that may configure it from then on.
from dspy.dsp.utils.settings import main_thread_config

from launcher.client.dspy.version_names import VersionedLM

_logged: set[str] = set()


def install(lm: VersionedLM) -> None:
    """Make a copy of `lm` the default LM, unless one is configured; the first LM of a run is taken."""
    present: Any = main_thread_config["lm"]
    if present is None or (is_fallback_lm(present) and _root(present) != _root(lm)):
        copied = lm.copy()
        copied.is_fallback = True
        main_thread_config["lm"] = copied


def is_fallback_lm(lm: Any) -> bool:
    """Whether this LM is the fallback, which no user configured."""
    return bool(getattr(lm, "is_fallback", False))


def log_once(lm: VersionedLM) -> None:
    """Log the use of the fallback, once for each run."""
    if _root(lm) in _logged:
        return
    _logged.add(_root(lm))
    sys.stderr.write(
        "slipway: DSPy has no LM configured, so this run's policy answers where no LM is set "
        "(dspy.configure(lm=…) sets another)\n"
    )
    sys.stderr.flush()


def _root(lm: VersionedLM) -> str:
    return lm.session.endpoint.root
