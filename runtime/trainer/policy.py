"""The policy: a frozen base from a model folder, an adapter with fp32 masters, PEFT in and out.

Neighbours: the recipe trains it, the engine serves its exports, `network.py` is its network. Knows nothing of
rewards, batches or processes.

A master has the name of its layer in Hugging Face's files, which PEFT and vLLM use as well; so a file's names
are the masters' with a prefix, and no tensor is permuted or scaled on its way in or out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from runtime.shared.architectures import PolicyError, check_trainable, positions, state_of
from runtime.shared.language_model import OTHER_MODULES, is_multimodal, language_model, published_module
from runtime.shared.peft_format import CONFIG, PREFIX, WEIGHTS, Lora, check_adapter_config
from runtime.shared.projections import lora_targets
from runtime.trainer.attention import AttentionPattern, DenseMask
from runtime.trainer.grammar_masks import GrammarMasks
from runtime.trainer.network import (
    adapter_off,
    add_lora,
    compile_layers,
    enable_gradient_checkpointing,
    hidden_states,
    lm_head_of,
    load_model,
    windows_of,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve(model_path: str) -> Path:
    """The local folder of a model: itself, or a hub name's downloaded snapshot."""
    folder = Path(model_path)
    if folder.is_dir():
        return folder
    if model_path.startswith(("/", "./", "../", "~")):
        raise PolicyError(f"there is no model folder {model_path}")
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
    # The same weights once more, in their maker's own format.
    return Path(snapshot_download(model_path, allow_patterns=wanted, ignore_patterns=["consolidated*"]))


class Policy:
    """A model whose base is frozen in its own precision and whose adapter has fp32 masters.

    The model multiplies with the working copy, which equals the engine's copy of the exported fp32 file. Both
    round A and B to the model's precision and then fold the scale into B, which rounds B once more (C31).
    `config`: the language model's config.json. `folder`: the model's, with its tokenizer.
    `one_sequence_per_row`: a row holds one sequence, because the model passes a state along it.
    """

    def __init__(
        self, model: nn.Module, lora: Lora, device: torch.device, config: Mapping[str, Any], folder: Path
    ) -> None:
        self.model = model
        self.grammar_masks = GrammarMasks(folder, int(config["vocab_size"]))
        self.lora = lora
        self.device = device
        self.output: Callable[[Tensor], Tensor] = lm_head_of(model)  # hidden [T, D] to logits [T, V]
        self.one_sequence_per_row = bool(state_of(config))
        self._positions = positions(config)
        self._windows = windows_of(model)
        self._working = {name: weight for name, weight in model.named_parameters() if ".lora_" in name}
        self._scale = {name: lora.scale if ".lora_b." in name else 1.0 for name in self._working}
        self.master_weights = {
            name: weight if self._is_master(name) else nn.Parameter(weight.detach().float().clone())
            for name, weight in sorted(self._working.items())
        }
        self._rounded = [name for name in self.master_weights if not self._is_master(name)]
        self._multimodal = is_multimodal(config)
        self._peft_names = {
            name: _peft_name(name, multimodal=self._multimodal) for name in self.master_weights
        }

    def _is_master(self, name: str) -> bool:
        return self._working[name].dtype == torch.float32 and self._scale[name] == 1

    @property
    def is_fp32(self) -> bool:
        """Whether it multiplies in fp32, with the masters' own precision."""
        return all(working.dtype == torch.float32 for working in self._working.values())

    def hidden(self, tokens_BL: Tensor, positions_BL: Tensor, seen: Tensor | AttentionPattern) -> Tensor:
        """Last hidden states [B, L, D], normalised: the input of the output layer.

        `seen`: the places that each place sees, as a boolean mask [B, L, L] or as attention.py has it.
        """
        pattern = DenseMask(seen, positions_BL) if isinstance(seen, Tensor) else seen
        pattern.prepare(self._windows)
        return hidden_states(self.model, tokens_BL, positions_BL, pattern)

    def reference(self) -> AbstractContextManager[None]:
        """Inside, the adapter is off: the base, bit for bit."""
        return adapter_off(self.model)

    @contextmanager
    def with_adapter(self, folder: Path) -> Iterator[None]:
        """Inside, the decoder multiplies with another adapter of this shape; after it every bit is as before.

        For forward passes without gradients. Raises PolicyError for an adapter that this policy cannot hold.
        """
        tensors = self._read_adapter(folder)
        own = {name: working.detach().clone() for name, working in self._working.items()}
        try:
            with torch.no_grad():
                for name, working in self._working.items():
                    working.copy_(tensors[name].to(working.dtype) * self._scale[name])
            yield
        finally:
            with torch.no_grad():
                for name, value in own.items():
                    self._working[name].copy_(value)

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self.model.get_input_embeddings().num_embeddings

    def check_tokens(self, largest: int, longest: int) -> None:
        """Raises PolicyError for a token id or a sequence length that this model has no place for."""
        if largest >= self.vocab_size:
            raise PolicyError(f"token id {largest} is outside the model's vocabulary of {self.vocab_size}")
        if self._positions is not None and longest > self._positions:
            raise PolicyError(f"a sample has {longest} tokens, the model {self._positions} positions")

    def collect_gradients(self) -> None:
        """Add the working copy's gradients to the masters', in fp32; called after each micro-batch."""
        names = [name for name in self._rounded if self._working[name].grad is not None]
        if not names:
            return
        gradients = [torch.empty_like(self.master_weights[name]) for name in names]
        torch._foreach_copy_(gradients, [_gradient(self._working[name]) for name in names])
        torch._foreach_mul_(gradients, [self._scale[name] for name in names])
        sums, added = list[Tensor](), list[Tensor]()
        for name, gradient in zip(names, gradients, strict=True):
            self._working[name].grad = None
            master = self.master_weights[name]
            if master.grad is None:
                master.grad = gradient
            else:
                sums.append(master.grad)
                added.append(gradient)
        if sums:
            torch._foreach_add_(sums, added)

    def zero_grad(self) -> None:
        """Leave no gradient anywhere: neither in the masters nor in the working copy."""
        for weight in (*self.master_weights.values(), *self._working.values()):
            weight.grad = None

    @torch.no_grad()
    def refresh_working_copy(self) -> None:
        """Round the masters into the working copy, in place: compiled code keeps its addresses (C30)."""
        if self._rounded:
            working = [self._working[name] for name in self._rounded]
            torch._foreach_copy_(working, [self.master_weights[name] for name in self._rounded])
            for name, weight in zip(self._rounded, working, strict=True):
                if self._scale[name] != 1:
                    weight.mul_(self._scale[name])  # `_foreach_mul_` would round the scale first, on a CPU

    def export_adapter(self, folder: Path, base_model: str) -> None:
        """Write the adapter in PEFT form: fp32, Hugging Face names, nothing permuted or scaled.

        `base_model`: the name of its base, which means the same on another machine.
        """
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            self._peft_names[name]: weight.detach().cpu().contiguous()
            for name, weight in self.master_weights.items()
        }
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": self.lora.rank,
            "lora_alpha": self.lora.alpha,
            "lora_dropout": 0.0,
            "target_modules": sorted(self.lora.target_modules),
            # Its encoder of images has layers of the same names.
            **({"exclude_modules": OTHER_MODULES} if self._multimodal else {}),
            "bias": "none",
            "use_dora": False,
            "use_rslora": self.lora.use_rslora,
            "modules_to_save": None,
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")

    def check_adapter(self, folder: Path) -> None:
        """Raises PolicyError for an adapter in PEFT form that this policy cannot hold exactly."""
        self._read_adapter(folder)

    @torch.no_grad()
    def import_adapter(self, folder: Path) -> None:
        """Load an adapter in PEFT form. Raises PolicyError for one that this policy cannot hold exactly."""
        for name, value in self._read_adapter(folder).items():
            self.master_weights[name].copy_(value)
        self.refresh_working_copy()

    def _read_adapter(self, folder: Path) -> dict[str, Tensor]:
        """An adapter's tensors by our names, each of its master's shape, on the CPU. Raises PolicyError."""
        try:
            check_adapter_config(json.loads((folder / CONFIG).read_text()), self.lora)
            tensors = load_file(folder / WEIGHTS)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise PolicyError(f"the adapter {folder.name} cannot be read: {error!r}") from error
        wanted = {peft_name: name for name, peft_name in self._peft_names.items()}
        if set(tensors) != set(wanted):
            odd = sorted(set(tensors) ^ set(wanted))
            raise PolicyError(f"the adapter's tensors are not this model's: {odd[:3]} and {len(odd)} in all")
        for peft_name, name in wanted.items():
            if tensors[peft_name].shape != self.master_weights[name].shape:  # `copy_` would broadcast
                found, own = list(tensors[peft_name].shape), list(self.master_weights[name].shape)
                raise PolicyError(f"{peft_name} is {found}, not {own}")
        return {name: tensors[peft_name] for peft_name, name in wanted.items()}


def build(folder: Path, lora: Lora, *, dtype: str, device: str, seed: int, recompute: bool = False) -> Policy:
    """The policy of a Hugging Face folder with a fresh adapter: B is 0, so it starts as the base.

    A `lora` without target modules takes the model's own. `recompute`: layers keep their inputs alone for the
    backward pass. On a GPU layers are compiled, if no state passes along them. Raises PolicyError.
    """
    config = language_model(_read_config(folder))
    check_trainable(config)
    lora = lora.with_target_modules(lora_targets(config, lora.target_modules))
    model = load_model(folder, config, DTYPES[dtype], device)
    add_lora(model, lora.target_modules, lora.rank, seed)
    if device != "cpu" and not state_of(config):
        compile_layers(model)
    if recompute:
        enable_gradient_checkpointing(model)
    return Policy(model, lora, torch.device(device), config, folder)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise PolicyError(f"the model {folder.name} cannot be read: {error}") from error


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def _peft_name(name: str, *, multimodal: bool) -> str:
    """`model.layers.0.self_attn.q_proj.lora_a.weight` -> `base_model.model.<as published, lora_A>`."""
    name = published_module(name, multimodal=multimodal)
    return PREFIX + name.replace(".lora_a.", ".lora_A.").replace(".lora_b.", ".lora_B.")
