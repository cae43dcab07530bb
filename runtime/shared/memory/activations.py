"""The memory that a forward pass keeps for the backward pass, tensor by tensor.

Neighbours: `trainer.py` counts it for a row. The network is transformers' own with LoRA beside linear layers
whose weights are frozen (`runtime/trainer/network.py`): such a layer keeps its input for A, A's output for B,
and nothing for the frozen product. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.shared.model_shape import ModelShape

_FP32 = 4


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
        inside = sum(self._of_layer(layer) for layer in range(self.shape.layers)) + self._rotations()
        # The first layer's input has no gradient: a norm that stands first keeps nothing.
        first = 0 if self.shape.norms_after else self.shape.hidden * _FP32
        return last_norm + tokens * (inside - first) + self._masks(tokens, self.shape.layers)

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
        return tokens * (widest + 3 * shape.hidden * _FP32)

    def _of_layer(self, layer: int) -> int:
        return self._normalised() + self._attention() + self._feed_forward(layer) + self._lora(layer)

    def _rotations(self) -> int:
        """Cosines and sines, which all layers share; Gemma 3 has others for the layers with a window."""
        kinds = len(set(self.shape.windows)) if self.shape.norms == 4 else 1
        return 2 * self.shape.head_width * self.number_bytes * kinds

    def _normalised(self) -> int:
        """Norms compute in fp32 and keep their input so, with one scale a token, or one a head."""
        shape = self.shape
        found = shape.norms * (shape.hidden + 1)
        if shape.query_key_norms:
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
        return found * self.number_bytes + shape.heads * _FP32

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
