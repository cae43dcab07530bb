"""Fetches catalogs as a run does, from a server that is not SkyPilot's: `fetch_catalogs.py URL`."""

from __future__ import annotations

import json
import sys

from sky.skylet import constants

from launcher.backends.skypilot import sky_prices

if __name__ == "__main__":
    constants.HOSTED_CATALOG_DIR_URL = sys.argv[1]  # pyrefly: ignore[bad-assignment]
    print(json.dumps(sky_prices.fetch(["aws", "kubernetes"])))
