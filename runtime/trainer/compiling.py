"""torch.compile around a layer or a function; where torch cannot compile it, the function as it is written.

Neighbours: `network.py` compiles a model's layers, `losses.py` the output layer's chunks. Knows no model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException

_log = logging.getLogger(__name__)
# Lengths of fixed rows (shared/fixed_row_lengths.py), windows of a model, passes with gradients and without,
# with the adapter and without: four times as many as for the longest contexts.
MAX_GRAPHS = 256


class Compiled:
    """One function in graphs of fixed shapes; past `MAX_GRAPHS`, or where torch fails, as it is written.

    A failure is logged once for each function. `plain` stays true from then on, so that a pass which is
    computed again for its gradient is computed in the same way.
    """

    _logged: set[str] = set()

    def __init__(self, function: Callable[..., Any], backend: Any = "inductor") -> None:
        self.plain = False
        self._function = function
        self._name = getattr(function, "__qualname__", repr(function))
        self._compiled = torch.compile(
            function, backend=backend, dynamic=False, fullgraph=True, recompile_limit=MAX_GRAPHS
        )

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """What the function gives."""
        if not self.plain:
            try:
                return self._compiled(*arguments, **named)
            except TorchDynamoException as error:
                self.plain = True
                self._log(error)
        return self._function(*arguments, **named)

    def _log(self, error: Exception) -> None:
        if self._name not in self._logged:
            self._logged.add(self._name)
            why = " ".join(str(error).split())[:500]
            _log.warning("torch cannot compile %s, so it is computed as written, slower: %s", self._name, why)
