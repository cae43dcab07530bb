"""A checkpoint's logprob probe on disk: sequences, and the trainer's logprob of each token.

    probe.safetensors    tokens [P]            token ids of all sequences, end to end
                         sampled [P]           1 where the policy sampled the token: only these are compared
                         offsets [Q+1]         where each sequence begins
                         logprobs_policy [P]   under the new policy: temperature 1, the whole vocabulary
                         logprobs_base [P]     under the base alone

Neighbours: trainer/probe_logprobs.py makes it, gateway/engines/probe_comparison.py asks engines the same.
Pure names.
"""

from __future__ import annotations

PROBE_FILE = "probe.safetensors"
# Sampled tokens of a sequence that are compared: enough to tell, few enough to be quick.
PROBE_TOKENS = 256
