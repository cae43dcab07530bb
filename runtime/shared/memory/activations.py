"""The memory that a forward pass keeps for the backward pass, tensor by tensor.

Neighbours: `trainer.py` counts it for a row. The network is transformers' own with LoRA beside linear layers
whose weights are frozen (`runtime/trainer/network.py`): such a layer keeps its input for A, A's output for B,
and nothing for the frozen product. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.shared.model_shape import ModelShape

_FP32 = 4
# The gated delta rule: tokens of a chunk, and matrices of a chunk's tokens that each head keeps.
_CHUNK, _CHUNK_MATRICES = 64, 5


@dataclass(frozen=True)
class ActivationModel:
    """The computation of a policy: `number_bytes` of a value, LoRA's rank and the layers' names that have it.

    `masked`: attention with a mask of whole rows (on a CPU), where keys and values are repeated for each head
    and every layer keeps the mask as numbers; else attention by blocks.
    """

    shape: ModelShape
    rank: int
    names: tuple[str, ...]
    number_bytes: int = 2
    masked: bool = False

    def row(self, tokens: int, *, checkpointing: bool) -> int:
        """The bytes kept by a forward pass over one row, from the first layer to the last hidden states."""
        last_norm = tokens * _FP32 * (self.shape.hidden + 1)
        if checkpointing:
            return last_norm + self.shape.layers * tokens * self.shape.hidden * self.number_bytes
        begin = self._first_with_lora()
        inside = sum(self._of_layer(layer) for layer in range(begin, self.shape.layers)) + self._rotations()
        # Nothing before the first LoRA has a gradient: of its layer neither a norm that stands first nor what
        # passes a state keeps anything.
        first = 0 if self.shape.norms_after else self.shape.hidden * _FP32
        first += self._linear_attention() if self.shape.is_linear(begin) else 0
        return last_norm + tokens * (inside - first) + self._masks(tokens, self.shape.layers - begin)

    def _first_with_lora(self) -> int:
        """The first layer that has LoRA at all."""
        return next((layer for layer, _ in self.shape.with_lora(self.names)), 0)

    def largest_layer(self, tokens: int) -> int:
        """The bytes kept within the largest layer: with checkpointing they are computed again."""
        most = max(self._of_layer(layer) for layer in range(self.shape.layers))
        return tokens * (most + self._rotations()) + self._masks(tokens, 1)

    def gradients(self, tokens: int) -> int:
        """The largest memory of one layer's backward pass, beside the kept bytes."""
        shape, size = self.shape, self.number_bytes
        wide = shape.intermediate if shape.experts is None else 0
        if shape.experts is not None:
            wide = shape.experts.per_token * (shape.experts.width + shape.hidden)
        widest = max(4 * wide, 2 * (shape.query + 2 * shape.key_value)) * size
        if shape.linear_attention is not None:
            widest = max(widest, 2 * (2 * self._repeated_keys() + shape.linear_attention.value) * _FP32)
        return tokens * (widest + 3 * shape.hidden * _FP32)

    def _of_layer(self, layer: int) -> int:
        mixed = self._linear_attention() if self.shape.is_linear(layer) else self._attention()
        return self._normalised(layer) + mixed + self._feed_forward(layer) + self._lora(layer)

    def _rotations(self) -> int:
        """Cosines and sines, which all layers share; Gemma 3 has others for the layers with a window."""
        kinds = len(set(self.shape.windows)) if self.shape.norms == 4 else 1
        return 2 * self.shape.head_width * self.number_bytes * kinds

    def _normalised(self, layer: int) -> int:
        """Norms compute in fp32 and keep their input so, with one scale a token, or one a head."""
        shape = self.shape
        found = shape.norms * (shape.hidden + 1)
        if shape.query_key_norms and not shape.is_linear(layer):
            found += shape.query + shape.key_value + shape.heads + shape.key_heads
        return found * _FP32

    def _attention(self) -> int:
        """The input of the first products; queries, keys, values; the answer and its log-sum."""
        shape = self.shape
        keys = shape.query if self._repeats() else shape.key_value
        values = keys
        if shape.fused and not self._repeats():
            values = shape.query + 2 * shape.key_value  # a view of the fused product holds all of it
        answers = shape.query * (2 if shape.rotates_in_parts else 1)
        found = shape.query + keys + values + answers
        if self._has("q_proj", "k_proj", "v_proj", "qkv_proj"):
            found += shape.hidden
        if shape.gated:  # the gate, and what it is multiplied with; in fp32 the norm's input is both products
            found += shape.query * (3 if self.number_bytes == _FP32 else 2)
        return found * self.number_bytes + shape.heads * _FP32

    def _linear_attention(self) -> int:
        """The gated delta rule in transformers' own torch code, by what it was seen to keep.

        It computes in fp32, by chunks: of each head some matrices of a chunk's tokens, and one state a chunk.
        """
        linear, size = self.shape.linear_attention, self.number_bytes
        if linear is None:
            return 0
        state = linear.value_heads * linear.key_width * linear.value_width * _FP32 // _CHUNK
        matrices = linear.value_heads * (_CHUNK_MATRICES * _CHUNK + 8) * _FP32
        keys = self._repeated_keys() * (4 * _FP32 + 8 * size)
        return linear.value * (6 * _FP32 + size) + keys + linear.mixed * 2 * size + matrices + state

    def _repeated_keys(self) -> int:
        """The width of the keys of layers that pass a state, repeated for each head of values."""
        linear = self.shape.linear_attention
        return 0 if linear is None else linear.value_heads * linear.key_width

    def _repeats(self) -> bool:
        """Whether keys and values are repeated for each head (`runtime/trainer/attention.py`)."""
        shape = self.shape
        if shape.key_heads in (1, shape.heads):  # one is looked at by all, without a copy
            return False
        return self.masked or bool(shape.heads & (shape.heads - 1))

    def _masks(self, tokens: int, layers: int) -> int:
        return layers * tokens * tokens * self.number_bytes if self.masked else 0

    def _feed_forward(self, layer: int) -> int:
        """The gate, the activation's output, the up product, and the product of both, for A of down."""
        shape = self.shape
        if shape.experts is not None and layer not in shape.dense:
            return self._experts()
        found = 3 * shape.intermediate
        found += shape.intermediate if self._has("down_proj") else 0
        found += shape.hidden if self._has("gate_proj", "up_proj", "gate_up_proj") else 0
        return found * self.number_bytes

    def _experts(self) -> int:
        """For each expert a token goes to: gate, activation and up, and its answer beside its weight."""
        shape = self.shape
        assert shape.experts is not None
        one = 3 * shape.experts.width + shape.hidden
        found = shape.experts.per_token * one + 3 * shape.experts.shared_width
        return found * self.number_bytes + 2 * shape.experts.count * _FP32

    def _lora(self, layer: int) -> int:
        """The output of each A."""
        adapted = sum(1 for linear in self.shape.of_layer(layer) if linear.name in self.names)
        return adapted * self.rank * self.number_bytes

    def _has(self, *names: str) -> bool:
        return any(name in self.names for name in names)
