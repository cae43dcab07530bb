"""torch.compile around a layer or a function; where torch cannot compile it, the function as it is written.

Neighbours: `network.py` compiles a model's layers, `losses.py` the output layer's chunks. Knows no model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

_log = logging.getLogger(__name__)
# Lengths of fixed rows (shared/fixed_row_lengths.py), windows of a model, passes with gradients and without,
# with the adapter and without: four times as many as for the longest contexts.
MAX_GRAPHS = 256


class Compiled:
    """One function in graphs of fixed shapes, forward and backward; as it is written where torch fails.

    A failure is logged once for each function and reason. `plain` stays true from then on, so that a pass
    which is computed again for its gradient is computed in the same way. A shape past `MAX_GRAPHS` is
    computed as written each time. A card without memory left is no failure to compile: that step fails alone.
    """

    _logged: set[tuple[str, str]] = set()

    def __init__(self, function: Callable[..., Any], backend: Any = "inductor") -> None:
        self.plain = False
        self._function = function
        self._name = getattr(function, "__qualname__", repr(function))
        # Else a backward pass is compiled inside `backward()`, where its failure could only end the step.
        torch._functorch.config.force_non_lazy_backward_lowering = True
        self._compiled = torch.compile(
            function, backend=backend, dynamic=False, fullgraph=True, recompile_limit=MAX_GRAPHS
        )

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """What the function gives. Raises its errors."""
        if self.plain:
            return self._function(*arguments, **named)
        try:
            return self._compiled(*arguments, **named)
        except FailOnRecompileLimitHit as error:
            failed = error
        except TorchDynamoException as error:
            if _is_of_memory(error):
                raise
            failed = error
        found = self._function(*arguments, **named)  # an error of its own is not torch's
        self.plain = not isinstance(failed, FailOnRecompileLimitHit)
        self._log(failed)
        return found

    def _log(self, error: Exception) -> None:
        why = " ".join(str(error).split())[:500]
        if (self._name, why) not in self._logged:
            self._logged.add((self._name, why))
            _log.warning("torch cannot compile %s, so it is computed as written, slower: %s", self._name, why)


def _is_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False
