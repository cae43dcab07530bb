"""A guardian on a computer whose `python` is another program: `guard_rented.py PYTHON RECORD`.

PYTHON is what it would start of this package, or of SkyPilot; see `tests/unit/test_standby_home.py`.
"""

from __future__ import annotations

import sys

from launcher.teardown import guardian

if __name__ == "__main__":
    sys.executable = sys.argv[1]
    sys.exit(guardian.main(sys.argv[2:]))
