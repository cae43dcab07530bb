"""`tune run`, sooner: `python -m runtime.recipes.tune run RECIPE --config …` takes what `tune run` takes.

torchtune imports Hugging Face's `datasets` (with pandas and pyarrow) at its top, and its command line two
model hubs: 3 of the 6 s of CPU that a trainer needs to start, for loaders and downloads that no recipe here
touches. The command is torchtune's own; the same arguments behind plain `tune run` do the same work later.
"""

from __future__ import annotations

import argparse
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

_LEFT_OUT = ("datasets", "datasets.distributed")


class LeftOut(ModuleType):
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


def main() -> None:
    """Parse and run, as `tune` does."""
    sys.modules.update({name: LeftOut(name) for name in _LEFT_OUT})
    from torchtune._cli.run import Run

    parser = argparse.ArgumentParser(prog="tune")
    Run.create(parser.add_subparsers(required=True))
    arguments = parser.parse_args()
    arguments.func(arguments)


if __name__ == "__main__":
    main()
