"""Headers between a client and the gateway about the later use of a request's samples.

The headers that assign a request to a rollout are with the bodies (schema.py).
"""

from __future__ import annotations

# On an answer: fields of the request that had no effect here (a seed, on CPU; tools' `strict`, in a rollout).
IGNORED_HEADER = "x-slipway-ignored"
# "off": this request is asked as if there had been no turn before it.
CONTINUE_HEADER = "x-slipway-continue"
OFF = "off"
# On an answer: why none of its samples can be trained. On a request "refuse": then it is not answered at all.
UNTRAINABLE_HEADER = "x-slipway-untrainable"
REFUSE = "refuse"
