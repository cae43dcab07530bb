"""For programs written for OpenPipe's ART: a backend that is this run. The rest of such a program stays.

    from launcher.client.art import SlipwayBackend as LocalBackend

    backend = LocalBackend()

ART itself is never imported here: what it hands over is taken as it is, whichever release made it.
"""

from launcher.client.art.art_training import TrainResult
from launcher.client.art.backend import SlipwayBackend

# What ART calls its own.
LocalBackend = SkyPilotBackend = SlipwayBackend

__all__ = ["LocalBackend", "SkyPilotBackend", "SlipwayBackend", "TrainResult"]
