"""Says what of SkyPilot and of ours the end of a cluster still imports, after all was imported for it."""

from __future__ import annotations

import sys

from launcher.backends.skypilot import sky_calls, sky_providers

if __name__ == "__main__":
    sky_calls.import_what_ends()
    before = set(sys.modules)
    sky_calls.cluster_status("slip-0123abcd")
    sky_providers.candidates("slip-0123abcd", "H100:4", ["lambda"])
    sky_providers.instances([])
    late = sorted(name for name in set(sys.modules) - before if name.split(".")[0] in ("sky", "launcher"))
    print(late)
