"""The seven linear layers of a block, all of which an adapter of ours has, and where they stand.

By the names that Hugging Face's files, PEFT and vLLM share. Neighbours: peft_form.py refuses an adapter that
has others, trainer/decoder.py has torchtune's names for them, engine/ loads and compares them. Pure names.
"""

from __future__ import annotations

# Fused by engines into one product each, in this order.
QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
ATTENTION = (*QKV, "o_proj")
FEED_FORWARD = (*GATE_UP, "down_proj")

PROJECTIONS = (*ATTENTION, *FEED_FORWARD)
# Inside a layer: `self_attn.q_proj`, ….
PLACES = (*(f"self_attn.{name}" for name in ATTENTION), *(f"mlp.{name}" for name in FEED_FORWARD))
