"""The adapter that a run begins with, if one was given: `start/`, in PEFT form, in the run's folder.

The launcher puts it there before the runtime starts; queue.py takes it in as the run's first step, a
"restore" from this name, and the trainer commits it as version 1. Version 0 is the base without an adapter,
as in every run. Standard library only.
"""

from __future__ import annotations

START = "start"
FILES = ("adapter_config.json", "adapter_model.safetensors")
# The key of that step: it is taken in once, whichever process of the gateway does it.
KEY = "the adapter that the run begins with"


class StartError(Exception):
    """The run cannot begin with its adapter; the text has the reason."""
