"""The files of the adapter that a run begins with, if one was given: PEFT's, in the run's folder `start/`.

The launcher puts them there before the runtime starts; queue.py takes them in as the run's first step, a
"restore" from this name, and the trainer commits them as version 1. Version 0 is the base without an adapter,
as in every run. Standard library only.
"""

from __future__ import annotations

START = "start"
FILES = ("adapter_config.json", "adapter_model.safetensors")
# The key of that step: it is taken in once, whichever process of the gateway does it.
KEY = "the adapter that the run begins with"


class StartAdapterError(Exception):
    """The run cannot begin with its adapter; the text has the reason."""
