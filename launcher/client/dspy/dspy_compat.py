"""Every DSPy name that this room uses, by the part that needs it; the warnings for an untested DSPy.

A newer DSPy is reported once and tried. If it lacks a name, the parts without that name go on, and the line
names the others. Neighbours: all of this room; a test compares the list with its imports. Imports DSPy alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module, metadata

TESTED_VERSION = "3.4.1"

# Without these nothing of this room is there.
REQUIRED_NAMES = (
    "dspy:Adapter", "dspy:BaseLM", "dspy:ChatAdapter", "dspy:Example", "dspy:LM", "dspy:Module",
    "dspy:Predict", "dspy:Prediction", "dspy:configure", "dspy:context", "dspy:lm15", "dspy:settings",
    "dspy.clients.base_lm:BaseLM", "dspy.clients.base_lm:LM_CLASS_STATE_KEY",
    "dspy.dsp.utils.settings:main_thread_config", "dspy.teleprompt:Teleprompter",
    "dspy.utils.callback:BaseCallback", "dspy.utils.exceptions:AdapterParseError",
    "dspy.utils.exceptions:ContextWindowExceededError", "dspy.utils.exceptions:LMError",
    "dspy.utils.exceptions:LMInvalidRequestError",
)  # fmt: skip
# Of DSPy's own weight optimizers.
TRAINING_JOB_NAMES = (
    "dspy.clients.provider:Provider", "dspy.clients.provider:ReinforceJob",
    "dspy.clients.provider:TrainingJob", "dspy.clients.utils_finetune:TrainDataFormat",
    "dspy.clients.utils_finetune:TrainingStatus",
)  # fmt: skip


def has_name(name: str) -> bool:
    """Whether the installed DSPy has it: `module:attribute`."""
    module, _, attribute = name.partition(":")
    try:
        return hasattr(import_module(module), attribute)
    except ImportError:
        return False


def compatibility_warnings(version: str) -> Iterator[str]:
    """The warnings for this DSPy: none for the tested version, if it is complete."""
    if _version_numbers(version) > _version_numbers(TESTED_VERSION):
        yield f"DSPy {version} is newer than {TESTED_VERSION}, with which this was tested: it is tried"
    missing = [it for it in REQUIRED_NAMES if not has_name(it)]
    if missing:
        names = ", ".join(missing)
        yield f"DSPy {version} has no {names}, which is needed: pip install 'dspy=={TESTED_VERSION}'"
    if missing := [it for it in TRAINING_JOB_NAMES if not has_name(it)]:
        yield (
            f"DSPy {version} has no {', '.join(missing)}: its own BootstrapFinetune, GRPO and BetterTogether "
            "cannot train a PolicyLM; all else works"
        )


def has_training_jobs() -> bool:
    """Whether DSPy's own weight optimizers can train here."""
    return all(map(has_name, TRAINING_JOB_NAMES))


def installed_version() -> str:
    """The version of this DSPy, from its package metadata, or from DSPy itself if it was copied without."""
    try:
        return metadata.version("dspy")
    except metadata.PackageNotFoundError:
        return str(getattr(import_module("dspy"), "__version__", ""))


def log_warnings() -> None:
    """Log the warnings, once a process: modules are loaded once."""
    for line in compatibility_warnings(installed_version()):
        sys.stderr.write(f"slipway: {line}\n")
    sys.stderr.flush()


def _version_numbers(version: str) -> list[int]:
    """Its numbers; a candidate of a version counts as that version."""
    numbers = re.match(r"[\d.]*", version)
    return [int(it) for it in (numbers.group() if numbers else "").split(".") if it]
