"""Imports SkyPilot and our launcher into one environment; prints SkyPilot's version."""

import launcher  # noqa: F401 - beside it, that is the point
import sky

assert hasattr(sky, "launch")
print(sky.__version__)
