"""A user's own model on its way to a machine, over a real ssh that breaks: what is read of it, once."""

from __future__ import annotations

import pytest

from tests.cloud.rig import Rig

pytestmark = pytest.mark.slow


def test_a_model_of_the_users_is_brought_once_and_goes_on_where_the_line_broke(rig: Rig) -> None:
    print(rig.run_program("bring_model.py"))
