"""The policy as torchtune builds it: a frozen base from a model folder, all-linear LoRA, PEFT in and out.

Neighbours: the recipe trains it, the engine serves what it exports. With the recipes, the only importer of
torchtune. Knows nothing of rewards, batches or processes.

torchtune's own export to PEFT permutes the q and k matrices for Llama's rotary layout whatever the model,
which is wrong for Qwen2; here the names are mapped and the tensors left as they are.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchtune.models.qwen2 import lora_qwen2, qwen2_hf_to_tune
from torchtune.modules.peft import LoRALinear, disable_adapter

ATTENTION = ("q_proj", "k_proj", "v_proj", "output_proj")
# torchtune's name of a linear layer -> the Hugging Face name, which PEFT and vLLM use.
_TO_HF = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w2": "mlp.down_proj",
    "mlp.w3": "mlp.up_proj",
}
_MATRIX = {"lora_a": "lora_A", "lora_b": "lora_B"}
TARGETS = tuple(name.rpartition(".")[2] for name in _TO_HF.values())
_WEIGHTS = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"
_PREFIX = "base_model.model.model."
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PolicyError(Exception):
    """The model or the adapter cannot be trained here; the text says what is supported."""


@dataclass(frozen=True)
class Lora:
    """Rank and alpha; the update is (alpha / rank) B A."""

    rank: int
    alpha: float


def resolve(model_path: str) -> Path:
    """The local folder of a model: itself, or a hub name's downloaded snapshot."""
    folder = Path(model_path)
    if folder.is_dir():
        return folder
    if model_path.startswith(("/", "./", "../", "~")):
        raise PolicyError(f"there is no model folder {model_path}")
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model_path, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))


class Policy:
    """A decoder whose base is frozen in `dtype` and whose adapter has fp32 masters.

    With a bf16 base the adapter's working copy is the master rounded to bf16, which is also what the engine
    makes of the exported fp32 file: both sides compute with the same numbers.
    """

    def __init__(self, model: nn.Module, lora: Lora, device: torch.device) -> None:
        self.model = model
        self.lora = lora
        self.device = device
        self._working = {name: weight for name, weight in model.named_parameters() if ".lora_" in name}
        self.masters = {
            name: weight if weight.dtype == torch.float32 else nn.Parameter(weight.detach().float())
            for name, weight in sorted(self._working.items())
        }

    @property
    def output(self) -> Callable[[Tensor], Tensor]:
        """Hidden states [T, D] to logits [T, V]."""
        return self.model.output  # pyright: ignore[reportReturnType]

    def hidden(self, tokens_BL: Tensor, positions_BL: Tensor, mask_BLL: Tensor) -> Tensor:
        """Last hidden states [B, L, D], normalised: what the output layer takes."""
        model: Any = self.model
        state = model.tok_embeddings(tokens_BL)
        for layer in model.layers:
            state = layer(state, mask=mask_BLL, input_pos=positions_BL)
        return model.norm(state)

    def reference(self) -> AbstractContextManager[None]:
        """Inside, the adapter is off: the base, bit for bit."""
        return disable_adapter(self.model)

    def check_tokens(self, largest: int, longest: int) -> None:
        """Raises PolicyError for a token id or a sample length that this model has no place for."""
        model: Any = self.model
        vocabulary, positions = model.tok_embeddings.num_embeddings, model.max_seq_len
        if largest >= vocabulary:
            raise PolicyError(f"token id {largest} is outside the model's vocabulary of {vocabulary}")
        if longest > positions:
            raise PolicyError(f"a sample has {longest} tokens, the model {positions} positions")

    def collect_gradients(self) -> None:
        """Add the working copy's gradients to the masters', in fp32; called after each micro-batch."""
        for name, master in self.masters.items():
            working = self._working[name]
            if master is not working and working.grad is not None:
                gradient = working.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
                working.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters into the working copy."""
        for name, master in self.masters.items():
            if master is not self._working[name]:
                self._working[name].copy_(master)

    def export_adapter(self, folder: Path, base_model: str) -> None:
        """Write the adapter in PEFT form: fp32, Hugging Face names, nothing permuted or scaled."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            _peft_name(name): weight.detach().cpu().contiguous() for name, weight in self.masters.items()
        }
        save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": self.lora.rank,
            "lora_alpha": self.lora.alpha,
            "lora_dropout": 0.0,
            "target_modules": sorted(TARGETS),
            "bias": "none",
            "use_dora": False,
            "use_rslora": False,
            "modules_to_save": None,
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")

    @torch.no_grad()
    def import_adapter(self, folder: Path) -> None:
        """Load an adapter in PEFT form. Raises PolicyError for one that this policy cannot hold exactly."""
        check_adapter_config(json.loads((folder / _CONFIG).read_text()), self.lora)
        tensors = load_file(folder / _WEIGHTS)
        wanted = {_peft_name(name): name for name in self.masters}
        if set(tensors) != set(wanted):
            odd = sorted(set(tensors) ^ set(wanted))
            raise PolicyError(f"the adapter's tensors are not this model's: {odd[:3]} and {len(odd)} in all")
        for peft_name, name in wanted.items():
            if tensors[peft_name].shape != self.masters[name].shape:  # `copy_` would broadcast
                found, own = list(tensors[peft_name].shape), list(self.masters[name].shape)
                raise PolicyError(f"{peft_name} is {found}, not {own}")
        for peft_name, name in wanted.items():
            self.masters[name].copy_(tensors[peft_name])
        self.refresh()


def check_adapter_config(config: dict[str, Any], lora: Lora) -> None:
    """Refuse what would be trained or served as something else (C14, C27)."""
    refused = {
        "use_dora": "DoRA",
        "use_rslora": "rank-stabilised scaling",
        "modules_to_save": "whole modules beside the adapter",
        "rank_pattern": "a rank per layer",
        "alpha_pattern": "an alpha per layer",
        "fan_in_fan_out": "transposed layers",
    }
    for key, what in refused.items():
        if config.get(key):
            raise PolicyError(f"the adapter uses {what} ({key}), which is not supported")
    if config.get("bias", "none") != "none":
        raise PolicyError(f"the adapter trains biases (bias={config['bias']!r}), which is not supported")
    start = config.get("init_lora_weights", True)
    if start not in (True, False, None, "gaussian"):  # the others move a part of the base into the adapter
        raise PolicyError(f"the adapter was started by {start} (init_lora_weights), which changes the base")
    if sorted(config["target_modules"]) != sorted(TARGETS):
        raise PolicyError(f"the adapter targets {config['target_modules']}, not all linear layers: {TARGETS}")
    if (config["r"], float(config["lora_alpha"])) != (lora.rank, float(lora.alpha)):
        found = f"rank {config['r']}, alpha {config['lora_alpha']}"
        raise PolicyError(f"the adapter has {found}, the run rank {lora.rank}, alpha {lora.alpha:g}")


def build(folder: Path, lora: Lora, *, dtype: str, device: str, seed: int) -> Policy:
    """The policy of a Hugging Face folder with a fresh adapter: B is 0, so it starts as the base.

    A is drawn per tensor from the seed and the tensor's name, so it depends on nothing else.
    """
    config = json.loads((folder / "config.json").read_text())
    _check_architecture(config)
    # On "meta" nothing is allocated or drawn: a large model is read straight to where it stays.
    with torch.device("meta"):
        model = lora_qwen2(**_shape(config), **_lora_arguments(lora))
    weights = dict(_load(folder, DTYPES[dtype], device))
    base = qwen2_hf_to_tune(weights, tie_word_embeddings=bool(config.get("tie_word_embeddings")))
    missing, unexpected = model.load_state_dict(base, strict=False, assign=True)
    missing = [name for name in missing if ".lora_" not in name]
    if missing or unexpected:
        raise PolicyError(
            f"the weights are not this model's: missing {missing[:3]}, unexpected {unexpected[:3]}"
        )
    _start_positions(model, device)
    _start_adapter(model, seed, DTYPES[dtype], device)
    for name, weight in model.named_parameters():
        weight.requires_grad_(".lora_" in name)
    return Policy(model, lora, torch.device(device))


def _check_architecture(config: dict[str, Any]) -> None:
    kinds = config.get("architectures") or []
    if kinds != ["Qwen2ForCausalLM"]:
        raise PolicyError(
            f"cannot train {kinds or 'a model without an architecture'}, only Qwen2ForCausalLM so far"
        )
    heads = config["num_attention_heads"]
    if config.get("head_dim", config["hidden_size"] // heads) * heads != config["hidden_size"]:
        raise PolicyError("cannot train a Qwen2 whose head size is not its width over its heads")
    if config.get("use_sliding_window"):
        raise PolicyError("cannot train a Qwen2 with sliding-window attention")


def _shape(config: dict[str, Any]) -> dict[str, Any]:
    # transformers 5 keeps the base of the rotary embedding in `rope_parameters`, 4 in `rope_theta`.
    rope = config.get("rope_parameters") or config
    if rope.get("rope_type", "default") != "default" or config.get("rope_scaling"):
        raise PolicyError("cannot train a Qwen2 with scaled rotary embeddings")
    return {
        "vocab_size": config["vocab_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "embed_dim": config["hidden_size"],
        "intermediate_dim": config["intermediate_size"],
        "max_seq_len": config["max_position_embeddings"],
        "norm_eps": config["rms_norm_eps"],
        "rope_base": rope["rope_theta"],
        "tie_word_embeddings": bool(config.get("tie_word_embeddings")),
    }


def _lora_arguments(lora: Lora) -> dict[str, Any]:
    return {
        "lora_attn_modules": list(ATTENTION),
        "apply_lora_to_mlp": True,
        "lora_rank": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
    }


def _load(folder: Path, dtype: torch.dtype, device: str) -> Iterator[tuple[str, Tensor]]:
    for file in _weight_files(folder):
        for name, weight in load_file(folder / file).items():
            # A copy even where nothing changes: what was read lies in the mapped file.
            yield name, weight.to(device=device, dtype=dtype, copy=True)


def _weight_files(folder: Path) -> list[str]:
    """The one file, or the shards that the index names; a folder may hold other copies of the weights."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    if not (folder / "model.safetensors").is_file():
        raise PolicyError(
            f"{folder} holds no model.safetensors, nor an index of shards; nothing else is read"
        )
    return ["model.safetensors"]


def _start_positions(model: nn.Module, device: str) -> None:
    """One table of rotary positions for all layers (torchtune makes one for each)."""
    layers: Any = model.layers
    rotary = layers[0].attn.pos_embeddings
    rotary.rope_init()
    rotary.to(device)
    for layer in layers:
        layer.attn.pos_embeddings = rotary


@torch.no_grad()
def _start_adapter(model: nn.Module, seed: int, dtype: torch.dtype, device: str) -> None:
    """PEFT's start: A uniform in ±1/sqrt(fan-in), B zero."""
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


def _peft_name(name: str) -> str:
    """`layers.0.attn.q_proj.lora_a.weight` -> `<prefix>layers.0.self_attn.q_proj.lora_A.weight`."""
    _, layer, block, module, matrix, _ = name.split(".")
    return f"{_PREFIX}layers.{layer}.{_TO_HF[f'{block}.{module}']}.{_MATRIX[matrix]}.weight"
