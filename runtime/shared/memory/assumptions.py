"""The assumptions of the memory arithmetic, in one place; none was measured on a GPU.

Neighbours: `trainer.py` and `engine.py` count with these. The rest of their figures follows from shapes.
"""

from __future__ import annotations

GIB = 2**30

# CUDA's context and its libraries' work spaces, in each process that uses a GPU.
CONTEXT_BYTES = round(1.0 * GIB)
# NCCL's buffers, where several GPUs train.
NCCL_BYTES = round(0.5 * GIB)
# Memory lost between the allocator's blocks, as a share of the memory allocated and freed in each step.
FRAGMENTATION = 0.06
# The share of nvidia-smi's figure that CUDA can hand out; and the reserve that is left over.
OF_THE_LISTED = 0.985
RESERVE_BYTES = round(0.5 * GIB)

# vLLM 0.32 (vllm/engine/arg_utils.py): places and tokens of one forward pass by the GPU's memory, as an
# OpenAI server; (at least so many GiB, places, tokens), and A100s count as small.
ENGINE_DEFAULTS = ((160, 1024, 16384), (70, 1024, 8192), (0, 256, 2048))
# vLLM counts the graphs it captures beside its fraction of a GPU, not in it.
GRAPHS_BYTES = round(1.0 * GIB)
# Sampling, for each place and word of the vocabulary: fp32 logits, their softmax, a sort and its indices.
SAMPLING_BYTES_PER_WORD = 16
# The engine's default share of a GPU of its own (engine/command.py).
ENGINE_FRACTION = 0.9
# Such an engine measures its cache itself: so much of the planned one is counted on.
CACHE_SHARE = 0.8
# vLLM 0.32 with a prefix cache (vllm/v1/kv_cache_interface.py): the states of linear attention that it keeps
# of a sequence, and the tokens that a block of its cache is a multiple of.
STATES_PER_SEQUENCE = 2
PAGE_TOKENS = 16

# losses.py: sampled tokens whose logits are there at a time, and bytes for each of them and word of the
# vocabulary: logits, log-softmax, its exponential and their product, in fp32.
LOGITS_CHUNK = 1024
LOGITS_BYTES_PER_WORD = 16
