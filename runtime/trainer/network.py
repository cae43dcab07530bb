"""The network of a model's folder: transformers' own model, with LoRA beside its linear layers.

Neighbours: `policy.py` trains it, `attention.py` has its attention. With the engine's server the only
importer of transformers, with the recipes of torchtune. Knows nothing of adapters on disk or of the training.

The model computes as its authors' code does, in any family; weights are assigned as they are stored, and
every tensor keeps the name that Hugging Face's files, PEFT and vLLM know it by.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torchtune.modules.peft import LoRALinear, disable_adapter
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, Mxfp4Config, logging
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from runtime.shared.architectures import GATED_DELTA, PolicyError
from runtime.shared.language_model import KEPT_IN_FP32, file_name_mapping, is_multimodal, is_of_language_model
from runtime.trainer.attention import AttentionPattern, attend
from runtime.trainer.compiling import Compiled

adapter_off = disable_adapter

_ATTENTION = "slipway"


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model's folder, as vLLM has it. Raises OSError and ValueError."""
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def end_tokens(folder: Path, tokenizer: Any) -> frozenset[int]:
    """The ids at which vLLM ends an answer: the tokenizer's own, and those that the model's folder names."""
    try:
        settings = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:  # as vLLM does
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        settings = transformers.GenerationConfig.from_model_config(config)
    named = settings.eos_token_id
    ids = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    return frozenset(one for one in ids if one is not None)


def load_model(folder: Path, config: Mapping[str, Any], dtype: torch.dtype, device: str) -> nn.Module:
    """The frozen base of a folder. Raises PolicyError unless its weights are this model's, all of them.

    `config`: the language model's config.json, which names one architecture. Of a multimodal checkpoint the
    language model alone is loaded.
    """
    kind = str(config.get("model_type"))
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise PolicyError(
            f"transformers {transformers.__version__} has no language model of the type {kind!r}"
        )
    multimodal = is_multimodal(config)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] if multimodal else config["architectures"][0]
    AttentionInterface.register(_ATTENTION, attend)
    logging.disable_progress_bar()
    quantized = config.get("quantization_config")
    if kind in GATED_DELTA:
        # transformers' own word for tensors that no dtype applies to.
        network = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
        network._keep_in_fp32_modules_strict = {KEPT_IN_FP32.rpartition(".")[2]}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # of tensors that are not this model's: they are refused below, or not read
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            device_map={"": device},
            attn_implementation=_ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, with their shapes
            # A model with quantized weights is trained as the plain weights that they stand for.
            **({"quantization_config": Mxfp4Config(dequantize=True)} if quantized else {}),
            **(_language_model_of(folder, config) if multimodal else {}),
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, AttributeError) as error:
        why = " ".join(str(error).split())
        raise PolicyError(f"transformers cannot load {folder.name}: {why}") from error
    finally:
        logging.set_verbosity(verbosity)
    if type(model).__name__ != architecture:
        raise PolicyError(f"its model_type is a {type(model).__name__}'s, its architecture {architecture}")
    if multimodal:
        found["unexpected_keys"] = [name for name in found["unexpected_keys"] if is_of_language_model(name)]
    _refuse_other_weights(found)
    _tie(model)
    for weight in model.parameters():
        weight.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # C29
    return model.eval()


def _language_model_of(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """from_pretrained's arguments for the language model of a multimodal checkpoint."""
    published = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    own = published.get_text_config()
    if "tie_word_embeddings" in config:
        own.tie_word_embeddings = config["tie_word_embeddings"]
    return {"config": own, "key_mapping": file_name_mapping()}


def _refuse_other_weights(found: dict[str, Any]) -> None:
    for kind in ("missing", "unexpected", "mismatched"):
        odd = sorted(_describe_mismatch(one) for one in found.get(f"{kind}_keys") or ())
        if odd:
            raise PolicyError(f"the weights are not this model's: {kind}: {odd[:3]} and {len(odd)} in all")


def _describe_mismatch(one: Any) -> str:
    """A tensor's name, and of one with another shape both."""
    if isinstance(one, str):
        return one
    name, stored, built = one
    return f"{name} is {list(stored)}, not {list(built)}"


def _tie(model: Any) -> None:
    """Share one matrix if the config ties them, also when a file holds a head as well (C32)."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.tie_word_embeddings and head.weight is not embeddings.weight:
        head.weight = embeddings.weight


def add_lora(model: nn.Module, targets: Sequence[str], rank: int, seed: int) -> None:
    """Give every linear layer of these names a LoRA beside it, which starts as PEFT's does: B is 0.

    A is uniform in ±1/sqrt(fan-in), by seed and name alone. The scale is 1: the caller folds its own into B.
    Raises PolicyError for a name that no linear layer of a block has.
    """
    head = getattr(model, "lm_head", None)
    chosen = {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in targets and module is not head and ".layers." in f".{name}"
    }
    missing = sorted(set(targets) - {name.rpartition(".")[2] for name in chosen})
    if missing:
        linear = {name: module for name, module in model.named_modules() if _linear(module)}
        own = sorted({name.rpartition(".")[2] for name in linear if ".layers." in f".{name}"})
        raise PolicyError(
            f"no layer of the model is called {', '.join(missing)}; its linear layers are {own}"
        )
    for name, module in chosen.items():
        if not _linear(module):
            raise PolicyError(f"{name} is a {type(module).__name__}, which cannot have LoRA")
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, _with_lora(module, name, rank, seed))


def _linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


class LoRA(LoRALinear):
    """torchtune's own with fewer passes over the output: the scale is 1, and nothing is multiplied by it.

    In a fp32 layer on a CPU, B's product is added to the base's in place: the same sums without a copy.
    Elsewhere it is rounded before it is added, as the engine rounds it.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        if self.disabled or x.dtype != torch.float32 or x.device.type != "cpu":
            y = functional.linear(x, self.weight, self.bias)
            return y if self.disabled else y + self.lora_b(self.lora_a(x))
        x_TI = x.reshape(-1, x.shape[-1])
        y_TO = functional.linear(x_TI, self.weight, self.bias)
        y_TO.addmm_(self.lora_a(x_TI), self.lora_b.weight.t())
        return y_TO.view(*x.shape[:-1], y_TO.shape[-1])  # x may be of no tokens


def _with_lora(linear: Any, name: str, rank: int, seed: int) -> nn.Module:
    weight: Tensor = linear.weight
    with torch.device("meta"):  # nothing is drawn: the base's weights are assigned, A and B filled below
        found = LoRA(
            linear.in_features,
            linear.out_features,
            rank,
            float(rank),
            use_bias=linear.bias is not None,
        )
    found.weight, found.bias = linear.weight, linear.bias
    found.to_empty(device=weight.device)
    found.lora_a.to(weight.dtype)
    found.lora_b.to(weight.dtype)
    generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
    bound = 1 / math.sqrt(linear.in_features)
    start = torch.empty(rank, linear.in_features).uniform_(-bound, bound, generator=generator)
    with torch.no_grad():
        found.lora_a.weight.copy_(start)
        found.lora_b.weight.zero_()
    return found


def compile_layers(model: Any, backend: Any = "inductor") -> None:
    """Have torch compile every layer; not of a model with experts, whose tokens decide what is computed.

    The embeddings' output asks for a gradient, so that the first layer has the graph of all others.
    """
    if any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules()):
        return
    for layer in _layers(model):
        layer.forward = Compiled(layer.forward, backend)
    model.get_input_embeddings().register_forward_hook(
        lambda module, given, found: found.requires_grad_(torch.is_grad_enabled())
    )


def windows_of(model: Any) -> list[int | None]:
    """The attention windows of a model's layers, None where a place sees all before it.

    Most attentions hold their own; Mistral's and Phi-3's read the config's at each pass.
    """
    found = {getattr(holder, "sliding_window", None) for holder in (*model.modules(), model.config)}
    return [None, *sorted(window for window in found if isinstance(window, int))]


def _layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def enable_gradient_checkpointing(model: Any) -> None:
    """Have every layer keep its input alone for the backward pass, and compute the rest again there.

    By a wrapper around it: transformers' own way asks that the layer be in training, and some drop out then.
    """
    layers = _layers(model)
    if not (model.supports_gradient_checkpointing and layers):
        raise PolicyError(f"transformers has no activation checkpointing for a {type(model).__name__}")
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def hidden_states(model: Any, tokens_BL: Tensor, positions_BL: Tensor, seen: AttentionPattern) -> Tensor:
    """Last hidden states [B, L, D], normalised: the input of the output layer."""
    found = model.base_model(input_ids=tokens_BL, position_ids=positions_BL, use_cache=False, seen=seen)
    return found.last_hidden_state


def lm_head_of(model: Any) -> Callable[[Tensor], Tensor]:
    """Hidden states [T, D] to logits [T, V], as the model's own forward pass makes them."""
    config, head = model.config, model.get_output_embeddings()
    divided_by = getattr(config, "logits_scaling", None) or 1.0
    times = getattr(config, "logit_scale", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)

    def output(hidden_TD: Tensor) -> Tensor:
        logits_TV = head(hidden_TD)
        if divided_by != 1:
            logits_TV = logits_TV / divided_by
        if times != 1:
            logits_TV = logits_TV * times
        return logits_TV if cap is None else torch.tanh(logits_TV / cap) * cap

    return output
