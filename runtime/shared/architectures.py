"""What a model's config.json says of its decoder, and a refusal of what would be built as something else.

Neighbours: `decoder.py` builds a Shape. Pure: knows nothing of torch, torchtune or weights.
Qwen2, Qwen2.5 and Llama (2 to 3.3) differ in little: biases on q, k and v, and how rotation is scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.shared.schema import ARCHITECTURES

_QWEN2, _LLAMA = ARCHITECTURES["qwen2"], ARCHITECTURES["llama"]
# What transformers takes where a config says nothing (both families).
_ROTATION_BASE = 10_000.0


class PolicyError(Exception):
    """The model or the adapter cannot be trained here; the text says what is supported."""


@dataclass(frozen=True)
class RotationScaling:
    """Llama 3.1's stretch of slow rotations: wavelengths in positions, relative to the original context."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int


@dataclass(frozen=True)
class Shape:
    """A decoder of SwiGLU blocks with grouped-query attention and rotary positions."""

    vocabulary: int
    layers: int
    heads: int
    key_heads: int
    head_width: int
    width: int
    inner_width: int
    positions: int
    norm_epsilon: float
    qkv_bias: bool
    tied: bool
    rotation_base: float
    rotation_scaling: RotationScaling | None


def read_shape(config: Mapping[str, Any]) -> Shape:
    """The shape a config.json describes, as transformers 4 or 5 wrote it. Raises PolicyError."""
    kinds = config.get("architectures") or []
    if len(kinds) != 1 or kinds[0] not in ARCHITECTURES.values():
        known = " and ".join(ARCHITECTURES.values())
        raise PolicyError(f"cannot train {kinds or 'a model without an architecture'}, only {known}")
    for key, plain in _plain(kinds[0]).items():
        if config.get(key) not in (None, *plain):
            raise PolicyError(f"cannot train a {kinds[0]} with {key} = {config[key]!r}")
    heads, width = config["num_attention_heads"], config["hidden_size"]
    base, scaling = _rotation(config, kinds[0])
    return Shape(
        vocabulary=config["vocab_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        key_heads=config.get("num_key_value_heads") or heads,
        head_width=config.get("head_dim") or width // heads,
        width=width,
        inner_width=config["intermediate_size"],
        positions=config["max_position_embeddings"],
        norm_epsilon=config["rms_norm_eps"],
        qkv_bias=kinds[0] == _QWEN2,
        tied=bool(config.get("tie_word_embeddings")),
        rotation_base=base,
        rotation_scaling=scaling,
    )


def _plain(kind: str) -> dict[str, tuple[Any, ...]]:
    """Keys that change the computation, with the values under which they change nothing."""
    plain: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "use_sliding_window": (False,)}
    plain |= {"partial_rotary_factor": (1, 1.0), "quantization_config": ()}
    if kind == _LLAMA:
        plain |= {"attention_bias": (False,), "mlp_bias": (False,)}
    return plain


def _rotation(config: Mapping[str, Any], kind: str) -> tuple[float, RotationScaling | None]:
    """Base and scaling. transformers 5 keeps both in `rope_parameters`, 4 in `rope_theta`, `rope_scaling`."""
    said: dict[str, Any] = {"rope_theta": config.get("rope_theta")}
    said |= config.get("rope_scaling") or {}
    said |= config.get("rope_parameters") or {}
    base = float(said["rope_theta"] or _ROTATION_BASE)
    scaled = said.get("rope_type") or said.get("type") or "default"
    if said.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise PolicyError(f"cannot train a {kind} with partly rotated heads")
    if scaled == "default":
        return base, None
    if scaled != "llama3" or kind != _LLAMA:
        raise PolicyError(f"cannot train a {kind} with {scaled} scaling of its rotary embeddings")
    return base, RotationScaling(
        factor=float(said["factor"]),
        low_frequency_factor=float(said["low_freq_factor"]),
        high_frequency_factor=float(said["high_freq_factor"]),
        original_positions=int(said["original_max_position_embeddings"]),
    )
