"""Passes a named instant: where none is armed, what would act there is not even imported."""

from __future__ import annotations

import sys

from launcher.base.failpoints import failpoint

failpoint("cli.armed")
assert "runtime.shared.failpoints" not in sys.modules
