"""Names that Arbor's scripts import from other packages: `dspy.teleprompt.ArborGRPO` and `peft.LoraConfig`.

Under `launch --arbor` they are there once the program has imported `arbor`. DSPy is not imported for it, and
an installed PEFT is used. Neighbours: `on_path/arbor` installs this, `peft_stand_in.py` is the stand-in;
`config/import_probe.py` knows that `arbor` supplies `peft`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

_OPTIMIZERS = "dspy.teleprompt"
_ARBORS = "ArborGRPO"
_PEFT = "peft"


class _OptimizersFinder(MetaPathFinder):
    """Adds Arbor's optimizer to DSPy's as soon as they are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == _OPTIMIZERS else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_add(module: ModuleType) -> None:
            execute(module)
            _add_optimizer(module)

        spec.loader.exec_module = execute_and_add
        return spec


class _PeftFinder(MetaPathFinder):
    """The last finder, so that it is asked only where PEFT is not installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _PEFT:
            return None
        return spec_from_file_location(_PEFT, Path(__file__).with_name("peft_stand_in.py"))


def install() -> None:
    """Supply the names in this process; again changes nothing."""
    if any(isinstance(it, _PeftFinder) for it in sys.meta_path):
        return
    if _OPTIMIZERS in sys.modules:
        _add_optimizer(sys.modules[_OPTIMIZERS])
    else:
        sys.meta_path.insert(0, _OptimizersFinder())
    sys.meta_path.append(_PeftFinder())


def _add_optimizer(module: ModuleType) -> None:
    """Give the module Arbor's optimizer, which is imported when it is asked for."""
    if hasattr(module, _ARBORS):
        return
    others = getattr(module, "__getattr__", None)

    def get(name: str) -> Any:
        if name == _ARBORS:
            from launcher.client.arbor.optimizer import ArborGRPO

            return ArborGRPO
        if others is not None:
            return others(name)
        raise AttributeError(f"module {_OPTIMIZERS!r} has no attribute {name!r}")

    module.__dict__["__getattr__"] = get
