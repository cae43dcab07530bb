"""The decoder in torchtune's modules: all-linear LoRA over a frozen base, from Hugging Face's names.

Neighbours: `policy.py` trains it, `architectures.py` says its shape. With the recipes, the only importer of
torchtune. Knows nothing of files, adapters on disk or what is trained.

torchtune's builders for Llama rotate neighbouring pairs of a head, in fp32, and permute the q and k weights
on the way in and out. Hugging Face's files and vLLM rotate the two halves, in the model's precision: so does
this, for every family, and nothing is permuted anywhere.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchtune.modules import (
    FeedForward,
    MultiHeadAttention,
    RMSNorm,
    TiedLinear,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)
from torchtune.modules.peft import LoRALinear, disable_adapter

from runtime.shared.architectures import PolicyError, RotationScaling, Shape
from runtime.shared.projections import PLACES

adapter_off = disable_adapter

# The projections' places in torchtune's layers, in their order.
_OURS: tuple[str, ...] = (
    "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.output_proj", "mlp.w1", "mlp.w3", "mlp.w2"
)  # fmt: skip
# torchtune's name of a linear layer -> the Hugging Face name, which PEFT and vLLM use.
TO_HF: dict[str, str] = dict(zip(_OURS, PLACES, strict=True))
_IN_A_LAYER = {
    **{f"{theirs}.{kind}": f"{ours}.{kind}" for ours, theirs in TO_HF.items() for kind in ("weight", "bias")},
    "input_layernorm.weight": "sa_norm.scale",
    "post_attention_layernorm.weight": "mlp_norm.scale",
}
_AROUND = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.scale",
    "lm_head.weight": "output.weight",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def build_decoder(shape: Shape, rank: int, alpha: float) -> nn.Module:
    """The decoder on "meta": nothing is allocated or drawn before its weights are known."""
    with torch.device("meta"):
        embeddings = nn.Embedding(shape.vocabulary, shape.width)
        # TiedLinear is no module and holds no weight: there is one matrix, whatever is loaded or saved.
        output: Any = (
            TiedLinear(embeddings) if shape.tied else nn.Linear(shape.width, shape.vocabulary, bias=False)
        )
        return TransformerDecoder(
            tok_embeddings=embeddings,
            layers=nn.ModuleList(_layer(shape, rank, alpha) for _ in range(shape.layers)),
            max_seq_len=shape.positions,
            num_heads=shape.heads,
            head_dim=shape.head_width,
            norm=RMSNorm(shape.width, eps=shape.norm_epsilon),
            output=output,
        )


def _layer(shape: Shape, rank: int, alpha: float) -> nn.Module:
    # Dropout is off: what was sampled without it must have the same probability here (C29).
    linear = partial(LoRALinear, rank=rank, alpha=alpha, dropout=0.0)
    queries, keys = shape.heads * shape.head_width, shape.key_heads * shape.head_width
    return TransformerSelfAttentionLayer(
        attn=MultiHeadAttention(
            embed_dim=queries,  # looked at, not used; a model's width may be another
            num_heads=shape.heads,
            num_kv_heads=shape.key_heads,
            head_dim=shape.head_width,
            q_proj=linear(shape.width, queries, use_bias=shape.qkv_bias),
            k_proj=linear(shape.width, keys, use_bias=shape.qkv_bias),
            v_proj=linear(shape.width, keys, use_bias=shape.qkv_bias),
            output_proj=linear(queries, shape.width),
            max_seq_len=shape.positions,
            attn_dropout=0.0,
        ),
        mlp=FeedForward(
            gate_proj=linear(shape.width, shape.inner_width),
            down_proj=linear(shape.inner_width, shape.width),
            up_proj=linear(shape.width, shape.inner_width),
        ),
        sa_norm=RMSNorm(shape.width, eps=shape.norm_epsilon),
        mlp_norm=RMSNorm(shape.width, eps=shape.norm_epsilon),
    )


def load_base(model: nn.Module, shape: Shape, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Take the base's tensors, by Hugging Face's names, as they are. Raises PolicyError unless they fit."""
    found = dict(_renamed(shape, weights))
    wanted = {name: weight.shape for name, weight in model.state_dict().items() if ".lora_" not in name}
    missing, unexpected = sorted(wanted.keys() - found), sorted(found.keys() - wanted)
    if missing or unexpected:
        raise PolicyError(
            f"the weights are not this model's: missing {missing[:3]}, unexpected {unexpected[:3]}"
        )
    for name, size in wanted.items():
        if found[name].shape != size:
            raise PolicyError(
                f"the weights are not this model's: {name} is {list(found[name].shape)}, not {list(size)}"
            )
    model.load_state_dict(found, strict=False, assign=True)


def _renamed(shape: Shape, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, weight in weights:
        if name.endswith("rotary_emb.inv_freq") or (shape.tied and name == "lm_head.weight"):
            continue  # a table we make ourselves; a copy of the embeddings
        layer = _LAYER.fullmatch(name)
        inside = layer and _IN_A_LAYER.get(layer[2])
        # A name we do not know stays as it is, and is refused as unexpected.
        yield (f"layers.{layer[1]}.{inside}" if layer and inside else _AROUND.get(name, name)), weight


def start_positions(model: nn.Module, shape: Shape, device: str) -> None:
    """One table of rotary positions for all layers."""
    layers: Any = model.layers
    rotary = HalfRotary(shape, device)
    for layer in layers:
        layer.attn.pos_embeddings = rotary


class HalfRotary(nn.Module):
    """Rotary positions over the two halves of a head, as transformers and vLLM compute them.

    Angles, cosines and sines in fp32, rounded to the model's precision before they are multiplied.
    """

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__()
        frequency = _frequencies(shape, device)
        angle = torch.arange(shape.positions, device=device).float()[:, None] * frequency
        self.register_buffer("cosine", angle.cos(), persistent=False)  # [positions, head width / 2]
        self.register_buffer("sine", angle.sin(), persistent=False)

    def forward(self, x_BLHW: Tensor, *, input_pos: Tensor) -> Tensor:
        """Rotate each head of [B, L, H, W] to its position [B, L]."""
        cosine: Any = self.cosine
        sine: Any = self.sine
        cos, sin = (table[input_pos][:, :, None].to(x_BLHW.dtype) for table in (cosine, sine))
        first, second = x_BLHW.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _frequencies(shape: Shape, device: str) -> Tensor:
    """Radians per position [head width / 2], fp32."""
    even = torch.arange(0, shape.head_width, 2, dtype=torch.int64, device=device).float()
    frequency = 1.0 / (shape.rotation_base ** (even / shape.head_width))
    return frequency if shape.rotation_scaling is None else _stretched(frequency, shape.rotation_scaling)


def _stretched(frequency: Tensor, scaling: RotationScaling) -> Tensor:
    """Llama 3.1: rotations slower than the original context are slowed by `factor`, fast ones kept."""
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_positions / (2 * math.pi / frequency)  # within the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequency / scaling.factor + kept * frequency


@torch.no_grad()
def start_adapter(model: nn.Module, seed: int, dtype: torch.dtype, device: str) -> None:
    """PEFT's start: A uniform in ±1/sqrt(fan-in), B zero. A hangs on seed and name alone."""
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.to_empty(device=device)
            module.lora_a.to(dtype)
            module.lora_b.to(dtype)
    for name, weight in model.named_parameters():
        if name.endswith("lora_a.weight"):
            generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
            bound = 1 / math.sqrt(weight.shape[1])
            start = torch.empty(weight.shape, dtype=torch.float32).uniform_(
                -bound, bound, generator=generator
            )
            weight.copy_(start)
        elif name.endswith("lora_b.weight"):
            weight.zero_()
