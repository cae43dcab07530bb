"""Says how many mutants a run leaves out, so that none is left out in silence."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def pytest_report_collectionfinish(items: Sequence[pytest.Item]) -> str | None:
    """One line, where a run has the chosen mutants in it."""
    modules = (item.module for item in items if isinstance(item, pytest.Function) and _is_chosen(item))
    module = next(modules, None)
    return None if module is None else module.SELECTION.line()


def _is_chosen(item: pytest.Function) -> bool:
    return item.originalname == "test_the_mutation_is_caught"
