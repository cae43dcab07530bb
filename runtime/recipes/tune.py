"""`tune run`, sooner: `python -m runtime.recipes.tune run RECIPE --config …` takes what `tune run` takes.

torchtune imports at its top Hugging Face's `datasets` (with pandas and pyarrow), quantisation and models of
its own, and its command line two model hubs: 3.6 of the 8 s of CPU that a trainer needs to start, for code
that no recipe here uses. A trainer that has ended well also exits at once: taking its modules apart is a
second more. The command is torchtune's own; the same arguments behind plain `tune run` do the same work
later.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

_SKIPPED_MODULES = (
    "datasets",
    "datasets.distributed",
    "torchao",
    "torchao.dtypes",
    "torchao.dtypes.nf4tensor",
    "torchtune.datasets",
    "torchtune.generation",
    "torchtune.models",
    "torchtune.modules.low_precision",
)


class SkippedModule(ModuleType):
    """Stands where a module would be: its names can be imported, using one raises ImportError."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: object, **__: object) -> NoReturn:
            raise ImportError(f"{self.__name__}.{name} is left out here; start the recipe with `tune run`")

        return refuse


def skip_imports() -> None:
    """Import the parts of torchtune that recipes here use, and none of the rest."""
    sys.modules.update({name: SkippedModule(name) for name in _SKIPPED_MODULES})
    importlib.import_module("torchtune.modules.peft")
    for name in _SKIPPED_MODULES:
        if name.startswith("torchao"):
            del sys.modules[name]
    # As if it were not installed: transformers asks whether it is, and would import it.
    sys.modules["torchao"] = None  # pyrefly: ignore[unsupported-operation] - the import system's own word


def main() -> None:
    """Parse and run, as `tune` does."""
    ended_well = False

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        if ended_well:
            os._exit(0)

    atexit.register(leave)  # the first, and so the last that is called
    skip_imports()
    from torchtune._cli.run import Run

    parser = argparse.ArgumentParser(prog="tune")
    Run.create(parser.add_subparsers(required=True))
    arguments = parser.parse_args()
    try:
        arguments.func(arguments)
        ended_well = True
    except SystemExit as ended:
        ended_well = not ended.code
        raise


if __name__ == "__main__":
    main()
