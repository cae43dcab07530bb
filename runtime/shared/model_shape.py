"""A model's shape by its config.json, whatever its family: layers, widths, linear layers, size of the
weights.

Neighbours: `memory/` plans with it, `peft_format.py` derives an adapter's tensors from it, the launcher reads
it before a run. Pure: knows nothing of torch, files or weights. Keys that a config.json leaves out have
transformers' defaults.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.shared.architectures import GATED_DELTA, head_size, positions, rotation, state_of
from runtime.shared.language_model import is_multimodal
from runtime.shared.projections import ATTENTION, FEED_FORWARD, LISTED, has_experts, lora_targets

# By model_type: which families normalise queries and keys, and which have four norms in a layer.
_QUERY_KEY_NORMS = {
    "qwen3",
    "qwen3_moe",
    "gemma3_text",
    "olmo2",
    "olmo3",
    "olmoe",
    "exaone4",
    "hunyuan_v1_dense",
    *GATED_DELTA,
}
_ATTENTION_INTERVAL = 4
_FOUR_NORMS = {"gemma2", "gemma3_text", "glm4"}
_NORMS_AFTER = {"olmo2", "olmo3", "exaone4"}
# Families whose key for a window has no effect unless another key enables it.
_WINDOW_ON_REQUEST = {"qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3"}
_GEMMA3_PATTERN = 6
# Bits of a stored weight of an expert by the way it is quantized: four, and eight for each 32 of them.
_STORED_BITS = {"mxfp4": 4.25}


@dataclass(frozen=True)
class Linear:
    """A linear layer of a block: its place there ("self_attn.q_proj"), and its widths."""

    place: str
    into: int
    out: int

    @property
    def name(self) -> str:
        return self.place.rpartition(".")[2]

    @property
    def weights(self) -> int:
        return self.into * self.out


@dataclass(frozen=True)
class Experts:
    """The mixture of experts in a block: how many there are, how many a token goes to, how wide one is."""

    count: int
    per_token: int
    width: int
    shared_width: int = 0


@dataclass(frozen=True)
class LinearAttention:
    """The layers of a hybrid that pass a state along their tokens in place of attention (gated delta rule).

    `layers`: their indices. `key_heads` of width `key_width` for queries and keys, `value_heads` of width
    `value_width`. `kernel`: tokens under the convolution.
    """

    layers: frozenset[int]
    key_heads: int
    key_width: int
    value_heads: int
    value_width: int
    kernel: int

    @property
    def mixed(self) -> int:
        """The width of queries, keys and values together, which the convolution passes over."""
        return 2 * self.key_heads * self.key_width + self.value

    @property
    def value(self) -> int:
        """The width of all heads' values."""
        return self.value_heads * self.value_width

    def weights(self, hidden: int) -> int:
        """The number of weights of one such layer's mixer."""
        inward = hidden * (self.mixed + self.value + 2 * self.value_heads)
        return inward + self.mixed * self.kernel + self.value * hidden

    def state_bytes(self, number_bytes: int) -> int:
        """A sequence in one such layer of an engine, in bytes: state in fp32, tokens of the convolution."""
        state = self.value_heads * self.key_width * self.value_width * 4
        return state + self.mixed * (self.kernel - 1) * number_bytes


@dataclass(frozen=True)
class ModelShape:
    """`windows`: of each layer with attention, None if it sees all. `linears`: the linear layers of a block
    without experts. If `experts` has the layers of blocks with experts, only the blocks of `dense` (by index)
    are without. `positions`: None if unknown. `query_key_norms`: whether heads are normalised; `norms`: how
    many others a layer has; `norms_after`: they stand behind attention and feed-forward, not before.
    `rotates_in_parts`: the rotated and the other part of a query are put together anew, with another memory
    layout, so attention's output is kept twice. `stored_bits`: of an expert's weight in a quantized model.
    `multimodal`: it is the language model of a checkpoint that holds more. `gated`: attention's output has a
    gate, which the queries' layer computes. `linear_attention`: of a hybrid, its layers without attention.
    """

    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_width: int
    intermediate: int
    vocabulary: int
    tied: bool
    positions: int | None
    windows: tuple[int | None, ...]
    linears: tuple[Linear, ...]
    lora_names: tuple[str, ...]
    norms: int = 2
    norms_after: bool = False
    query_key_norms: bool = False
    rotates_in_parts: bool = False
    experts: Experts | None = None
    dense: frozenset[int] = frozenset()
    stored_bits: float | None = None
    multimodal: bool = False
    gated: bool = False
    linear_attention: LinearAttention | None = None

    @property
    def query(self) -> int:
        """The width of all heads' queries."""
        return self.heads * self.head_width

    @property
    def key_value(self) -> int:
        """The width of all heads' keys; of their values too."""
        return self.key_heads * self.head_width

    @property
    def fused(self) -> bool:
        """Whether queries, keys and values are one linear layer."""
        return self.linears[0].name == "qkv_proj"

    def of_layer(self, layer: int) -> tuple[Linear, ...]:
        """The linear layers of a block: of one with experts those of attention, of one that passes a state
        those of the feed-forward."""
        found = self.linears
        if self.experts is not None and layer not in self.dense:
            found = tuple(linear for linear in found if linear.place.startswith("self_attn."))
        if self.is_linear(layer):
            found = tuple(linear for linear in found if not linear.place.startswith("self_attn."))
        return found

    def is_linear(self, layer: int) -> bool:
        """Whether a layer passes a state along its tokens in place of attention."""
        return self.linear_attention is not None and layer in self.linear_attention.layers

    def with_lora(self, chosen: Sequence[str] | None = None) -> Iterator[tuple[int, Linear]]:
        """Layer and linear layer of every A and B: those of these names, or the default ones with LoRA."""
        names = tuple(chosen or self.lora_names)
        for layer in range(self.layers):
            for linear in self.of_layer(layer):
                if linear.name in names:
                    yield layer, linear

    def adapter_weights(self, rank: int, chosen: Sequence[str] | None = None) -> int:
        """The number of weights in an adapter of this rank."""
        return sum(rank * (linear.into + linear.out) for _, linear in self.with_lora(chosen))

    @property
    def expert_weights(self) -> int:
        """The number of weights in all experts of all layers."""
        if self.experts is None:
            return 0
        one = 3 * self.hidden * self.experts.width
        return (self.layers - len(self.dense)) * self.experts.count * one

    @property
    def weights(self) -> int:
        """The number of weights; norms and biases, about a thousandth of them, are left out."""
        blocks = sum(linear.weights for layer in range(self.layers) for linear in self.of_layer(layer))
        around = self.vocabulary * self.hidden * (1 if self.tied else 2)
        beside = 0
        if self.experts is not None:
            router_and_shared = self.hidden * (self.experts.count + 3 * self.experts.shared_width)
            beside = (self.layers - len(self.dense)) * router_and_shared
        if self.linear_attention is not None:
            beside += len(self.linear_attention.layers) * self.linear_attention.weights(self.hidden)
        return blocks + around + beside + self.expert_weights


def shape(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that a config.json describes; None if a key without a default is missing.

    None for a hybrid as well, but for those with the gated delta rule: of others sizes are not known.
    """
    if state_of(config) and config.get("model_type") not in GATED_DELTA:
        return None
    try:
        return _shape(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def linear_names(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The names of the blocks' linear layers, which can have LoRA. None if unknown."""
    found = shape(config)
    if found is None or config.get("model_type") not in LISTED:
        return None
    return found.lora_names + (FEED_FORWARD if found.dense else ())


def _shape(config: Mapping[str, Any]) -> ModelShape:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    layers = int(config["num_hidden_layers"])
    head = head_size(config) or 0
    key_heads = int(config.get("num_key_value_heads") or heads)
    kind = str(config.get("model_type"))
    names = lora_targets(config)
    quantized = (config.get("quantization_config") or {}).get("quant_method")
    experts = _experts(config)
    intermediate = int(config.get("intermediate_size") or 0) if experts else int(config["intermediate_size"])
    fused, gated = "qkv_proj" in names, kind in GATED_DELTA
    linear_attention = _linear_attention(config, layers) if gated else None
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_heads=key_heads,
        head_width=head,
        intermediate=intermediate,
        vocabulary=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", kind.startswith("gemma") or kind == "smollm3")),
        positions=positions(config),
        windows=_windows(config, layers - (len(linear_attention.layers) if linear_attention else 0)),
        linears=_linears(hidden, heads * head, key_heads * head, intermediate, fused=fused, gated=gated),
        lora_names=names,
        norms=4 if kind in _FOUR_NORMS else 2,
        norms_after=kind in _NORMS_AFTER,
        query_key_norms=kind in _QUERY_KEY_NORMS or bool(config.get("use_qk_norm")),
        rotates_in_parts=fused or bool(rotation(config).get("partial_rotary_factor")),
        experts=experts,
        dense=_dense(config, layers) if experts else frozenset(),
        stored_bits=_STORED_BITS.get(str(quantized)),
        multimodal=is_multimodal(config),
        gated=gated,
        linear_attention=linear_attention,
    )


def _linears(
    hidden: int, query: int, key_value: int, intermediate: int, *, fused: bool, gated: bool
) -> tuple[Linear, ...]:
    q, k, v, o = (f"self_attn.{name}" for name in ATTENTION)
    gate, up, down = (f"mlp.{name}" for name in FEED_FORWARD)
    ends = (Linear(o, query, hidden), Linear(down, intermediate, hidden))
    if fused:
        starts = (
            Linear("self_attn.qkv_proj", hidden, query + 2 * key_value),
            Linear("mlp.gate_up_proj", hidden, 2 * intermediate),
        )
        return starts[0], ends[0], starts[1], ends[1]
    return (
        Linear(q, hidden, 2 * query if gated else query),
        Linear(k, hidden, key_value),
        Linear(v, hidden, key_value),
        ends[0],
        Linear(gate, hidden, intermediate),
        Linear(up, hidden, intermediate),
        ends[1],
    )


def _linear_attention(config: Mapping[str, Any], layers: int) -> LinearAttention:
    kinds = config.get("layer_types")
    if not kinds:
        every = int(config.get("full_attention_interval") or _ATTENTION_INTERVAL)
        kinds = ["full_attention" if (layer + 1) % every == 0 else "linear" for layer in range(layers)]
    return LinearAttention(
        layers=frozenset(layer for layer, kind in enumerate(kinds) if kind != "full_attention"),
        key_heads=int(config["linear_num_key_heads"]),
        key_width=int(config["linear_key_head_dim"]),
        value_heads=int(config["linear_num_value_heads"]),
        value_width=int(config["linear_value_head_dim"]),
        kernel=int(config.get("linear_conv_kernel_dim") or 4),
    )


def _experts(config: Mapping[str, Any]) -> Experts | None:
    if not has_experts(config):
        return None
    count = next(int(config[key]) for key in _COUNTS if config.get(key))
    width = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = int(config.get("shared_expert_intermediate_size") or 0)
    shared += width * int(config.get("n_shared_experts") or 0)
    return Experts(count, int(config.get("num_experts_per_tok") or 2), width, shared)


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _dense(config: Mapping[str, Any], layers: int) -> frozenset[int]:
    """The layers of a mixture of experts that have none."""
    found = {int(layer) for layer in config.get("mlp_only_layers") or ()}
    found |= set(range(int(config.get("first_k_dense_replace") or 0)))
    every = int(config.get("decoder_sparse_step") or 1)
    return frozenset(layer for layer in range(layers) if layer in found or (layer + 1) % every)


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """How far back each layer sees; None: to the beginning."""
    window, kind = config.get("sliding_window"), str(config.get("model_type"))
    if not window or (kind in _WINDOW_ON_REQUEST and not config.get("use_sliding_window")):
        return (None,) * layers
    kinds = config.get("layer_types")
    if not kinds and kind in {"gemma3_text", "gemma2"}:
        every = int(config.get("sliding_window_pattern") or (_GEMMA3_PATTERN if kind == "gemma3_text" else 2))
        kinds = ["full_attention" if (layer + 1) % every == 0 else "sliding" for layer in range(layers)]
    if not kinds:
        return (int(window),) * layers
    return tuple(None if kind == "full_attention" else int(window) for kind in kinds)
