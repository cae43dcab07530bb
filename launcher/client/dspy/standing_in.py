"""The run's policy where DSPy has no LM configured: its prompt optimizers drop a program's own and ask that.

Neighbours: `lm.py` offers each LM that a program makes, `programs.py` gives its settings to a predictor that
has lost its own. What the user configures goes first, before and after. Knows nothing of programs or HTTP.
"""

from __future__ import annotations

import sys
from typing import Any

# DSPy's own `configure` would make this thread the only one that may configure it from then on.
from dspy.dsp.utils.settings import main_thread_config

from launcher.client.dspy.naming import AsksPolicy

_said: set[str] = set()


def offer(lm: AsksPolicy) -> None:
    """Let a copy of `lm` answer what has no LM, unless one is configured: the first of a run does."""
    present: Any = main_thread_config["lm"]
    if present is None or (is_stand_in(present) and _root(present) != _root(lm)):
        copied = lm.copy()
        copied.stands_in = True
        main_thread_config["lm"] = copied


def is_stand_in(lm: Any) -> bool:
    """Whether nobody configured this LM: it stands in."""
    return bool(getattr(lm, "stands_in", False))


def say_once(lm: AsksPolicy) -> None:
    """That it stands in, where it is asked."""
    if _root(lm) in _said:
        return
    _said.add(_root(lm))
    sys.stderr.write(
        "slipway: DSPy has no LM configured, so this run's policy answers where no LM is set "
        "(dspy.configure(lm=…) sets another)\n"
    )
    sys.stderr.flush()


def _root(lm: AsksPolicy) -> str:
    return lm.session.endpoint.root
