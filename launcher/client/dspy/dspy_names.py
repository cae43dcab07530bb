"""Every name of DSPy's that is used here, by what needs it; what is said of a DSPy that was not tested.

A newer DSPy is told once and tried. Where it lacks a name, what does not need that goes on, and the line says
what does not. Neighbours: all of this room; a test compares the list with its imports. Imports DSPy alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module, metadata

TESTED = "3.4.1"

# Without these nothing of this room is there.
NEEDED = (
    "dspy:Adapter", "dspy:BaseLM", "dspy:ChatAdapter", "dspy:Example", "dspy:LM", "dspy:Module",
    "dspy:Predict", "dspy:Prediction", "dspy:configure", "dspy:context", "dspy:lm15", "dspy:settings",
    "dspy.clients.base_lm:BaseLM", "dspy.clients.base_lm:LM_CLASS_STATE_KEY",
    "dspy.dsp.utils.settings:main_thread_config", "dspy.teleprompt:Teleprompter",
    "dspy.utils.callback:BaseCallback", "dspy.utils.exceptions:AdapterParseError",
    "dspy.utils.exceptions:ContextWindowExceededError", "dspy.utils.exceptions:LMError",
    "dspy.utils.exceptions:LMInvalidRequestError",
)  # fmt: skip
# Of DSPy's own weight optimizers.
JOBS = (
    "dspy.clients.provider:Provider", "dspy.clients.provider:ReinforceJob",
    "dspy.clients.provider:TrainingJob", "dspy.clients.utils_finetune:TrainDataFormat",
    "dspy.clients.utils_finetune:TrainingStatus",
)  # fmt: skip


def is_there(name: str) -> bool:
    """Whether the installed DSPy has it: `module:attribute`."""
    module, _, attribute = name.partition(":")
    try:
        return hasattr(import_module(module), attribute)
    except ImportError:
        return False


def remarks(version: str) -> Iterator[str]:
    """What is to be said of this DSPy: nothing of the tested one, if it is whole."""
    if _order(version) > _order(TESTED):
        yield f"DSPy {version} is newer than {TESTED}, with which this was tested: it is tried"
    lacking = [it for it in NEEDED if not is_there(it)]
    if lacking:
        names = ", ".join(lacking)
        yield f"DSPy {version} has no {names}, which is needed: pip install 'dspy=={TESTED}'"
    if lacking := [it for it in JOBS if not is_there(it)]:
        yield (
            f"DSPy {version} has no {', '.join(lacking)}: its own BootstrapFinetune, GRPO and BetterTogether "
            "cannot train a PolicyLM; all else works"
        )


def has_jobs() -> bool:
    """Whether DSPy's own weight optimizers can train here."""
    return all(map(is_there, JOBS))


def installed() -> str:
    """The version of this DSPy: what was installed says it, or, copied without that, DSPy itself."""
    try:
        return metadata.version("dspy")
    except metadata.PackageNotFoundError:
        return str(getattr(import_module("dspy"), "__version__", ""))


def say() -> None:
    """Say it, once a process: modules are loaded once."""
    for line in remarks(installed()):
        sys.stderr.write(f"slipway: {line}\n")
    sys.stderr.flush()


def _order(version: str) -> list[int]:
    """Its numbers; a candidate of a version counts as that version."""
    numbers = re.match(r"[\d.]*", version)
    return [int(it) for it in (numbers.group() if numbers else "").split(".") if it]
