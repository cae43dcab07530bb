"""For programs written for OpenPipe's ART: a backend that is this run. The rest of such a program stays.

    from launcher.client.art import SlipwayBackend as LocalBackend

    backend = LocalBackend()

ART itself is never imported here: its objects are used as they are, from any release.
"""

from launcher.client.art.art_training import TrainResult
from launcher.client.art.backend import SlipwayBackend

# ART's own name for it.
LocalBackend = SkyPilotBackend = SlipwayBackend

__all__ = ["LocalBackend", "SkyPilotBackend", "SlipwayBackend", "TrainResult"]
