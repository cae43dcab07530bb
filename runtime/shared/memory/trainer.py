"""The trainer's memory on one GPU: each training GPU holds the whole model and its own rows.

Neighbours: `activations.py` counts the tensors that a forward pass keeps, `planning.py` asks for whole
tables. The masters, their copy in the model's precision and AdamW's moments are those of
`runtime/trainer/policy.py`. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.shared.memory import assumptions
from runtime.shared.memory.activations import ActivationModel
from runtime.shared.memory.memory_item import MemoryLine, format_count
from runtime.shared.model_shape import ModelShape

_FP32 = 4


@dataclass(frozen=True)
class TrainerSetup:
    """The training setup: `row` is the longest row in tokens, of one sample or of several packed together.
    `scaled`: alpha is not the rank, so that fp32 has a working copy too. `gpus`: the number of training
    GPUs."""

    row: int
    checkpointing: bool
    rank: int
    names: tuple[str, ...]
    gpus: int = 1
    number_bytes: int = 2
    scaled: bool = False
    reference: bool = False


def items(shape: ModelShape, training: TrainerSetup) -> list[MemoryLine]:
    """Each byte of one training GPU, with its reason."""
    return [_base(shape, training), *_adapter(shape, training), *_row(shape, training), _overhead(training)]


def _base(shape: ModelShape, training: TrainerSetup) -> MemoryLine:
    size = shape.weights * training.number_bytes
    parameters = format_count(shape.weights)
    why = f"{parameters} parameters of {training.number_bytes} bytes, frozen, whole on each GPU"
    return MemoryLine("weights", size, why)


def _adapter(shape: ModelShape, training: TrainerSetup) -> list[MemoryLine]:
    numbers = shape.adapter_weights(training.rank, training.names)
    working = numbers * training.number_bytes if training.number_bytes < _FP32 or training.scaled else 0
    all_of_them = training.names == shape.lora_names and shape.experts is None
    where = "every linear layer of a block" if all_of_them else ", ".join(training.names)
    named = f"{format_count(numbers)} numbers, rank {training.rank} on {where}"
    return [
        MemoryLine(
            "adapter", numbers * _FP32 + working, f"{named}: fp32 masters, and what is multiplied with"
        ),
        MemoryLine("gradients", numbers * _FP32 + working, "of the masters, and of what is multiplied with"),
        MemoryLine("AdamW", numbers * 2 * _FP32, "two moments of each master, in fp32"),
    ]


def _row(shape: ModelShape, training: TrainerSetup) -> list[MemoryLine]:
    kept = ActivationModel(shape, training.rank, training.names, training.number_bytes)
    size = kept.row(training.row, checkpointing=training.checkpointing)
    each = round(size / training.row / 1000)
    what = "each layer's input alone" if training.checkpointing else "what every layer computed"
    why = f"{what}, {each:,} KB a token, for a row of {training.row:,}"
    room, reason = _room(shape, training, kept)
    lost = round((size + room) * assumptions.FRAGMENTATION)
    share = f"{assumptions.FRAGMENTATION:.0%} of the two above"
    return [
        MemoryLine("kept", size, f"for the backward pass: {why}"),
        MemoryLine("working room", room, reason),
        MemoryLine("fragmentation", lost, f"{share}, lost between blocks (assumed)"),
    ]


def _room(shape: ModelShape, training: TrainerSetup, kept: ActivationModel) -> tuple[int, str]:
    """The larger of two that are never there at once: logits, and the backward pass of a layer."""
    tokens = min(assumptions.LOGITS_CHUNK, training.row)
    logits = tokens * shape.vocabulary * assumptions.LOGITS_BYTES_PER_WORD
    layer = kept.gradients(training.row)
    again = ""
    if training.checkpointing:
        layer += kept.largest_layer(training.row)
        again = " computed again, with its gradients"
    reference = "; the reference pass (kl_beta) has its place in it" if training.reference else ""
    if logits >= layer:
        return logits, f"logits of {tokens:,} tokens at a time; one layer{again} fits in it{reference}"
    return layer, f"one layer{again or ' in its backward pass'}; logits fit in it{reference}"


def _overhead(training: TrainerSetup) -> MemoryLine:
    size = assumptions.CONTEXT_BYTES + (assumptions.NCCL_BYTES if training.gpus > 1 else 0)
    beside = " and NCCL's buffers" if training.gpus > 1 else ""
    return MemoryLine("CUDA", size, f"context, libraries{beside} (assumed)")
