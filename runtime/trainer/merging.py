"""Merges an adapter into its base model: `python -m runtime.trainer.merging --base … --adapter … --to …`.

One file of the base after the other, one tensor at a time, so that a model larger than memory can be merged.
Prints one JSON object: the merged layers, and the share of the adapter that the rounding to `--dtype` took
away.
Neighbours: `launch export --merge` runs it in the runtime's environment; `shared/peft_format.py` has the
form. While a run lives nothing is merged: engines and trainer keep A and B apart from the base.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.shared.architectures import PolicyError
from runtime.shared.language_model import KEPT_IN_FP32, name_in_language_model
from runtime.shared.peft_format import CONFIG, PREFIX, WEIGHTS, Lora, check_adapter_config
from runtime.trainer.policy import resolve

INDEX = "model.safetensors.index.json"
_DTYPE_KEYS = ("torch_dtype", "dtype")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Files beside the weights; others in a model's folder are not needed to load it.
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "LICENSE*")


class MergeReport:
    """The sums of a merge in progress."""

    def __init__(self) -> None:
        self.layers = 0
        self._wanted = self._lost = 0.0

    def add(self, change: Tensor, exact: Tensor, rounded: Tensor) -> None:
        """One layer: the adapter's change, the weights with it, and these as they are written."""
        self.layers += 1
        self._wanted += float(change.square().sum())
        self._lost += float((rounded.float() - exact).square().sum())

    @property
    def rounding_loss(self) -> float:
        """The rounding error over the adapter's whole change, both as norms; 0 if nothing is rounded."""
        return math.sqrt(self._lost / self._wanted) if self._wanted else 0.0


def merge(base: Path, adapter: Path, to: Path, dtype: str | None = None) -> MergeReport:
    """Write `base` with the adapter in it as a model folder of its own. `dtype` None: the base's.

    W + scale B A is computed in fp32. Raises PolicyError for an adapter that is not this base's.
    """
    left = _changes(adapter)
    merged = MergeReport()
    names, sizes = _weight_files(base), {}
    to.mkdir(parents=True, exist_ok=True)
    for name in names:
        tensors = dict(_merged_tensors(base / name, left, merged, dtype))
        save_file(tensors, to / name, metadata={"format": "pt"})
        sizes |= {tensor: value.numel() * value.element_size() for tensor, value in tensors.items()}
    if left:
        raise PolicyError(f"{base.name} has no {min(left)}: the adapter is another model's")
    _copy_the_rest(base, to, sum(sizes.values()), dtype)
    return merged


def _changes(adapter: Path) -> dict[str, tuple[Tensor, Tensor, float]]:
    """A, B and the scale, by the language model's own name of the weights they change."""
    config = json.loads((adapter / CONFIG).read_text())
    lora = Lora(
        config["r"], float(config["lora_alpha"]), bool(config.get("use_rslora")),
        tuple(config["target_modules"]),
    )  # fmt: skip
    check_adapter_config(config, lora)
    tensors = load_file(adapter / WEIGHTS)
    found = {}
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            weight = name_in_language_model(f"{layer.removeprefix(PREFIX)}.weight")
            found[weight] = (down.float(), tensors[f"{layer}.lora_B.weight"].float(), lora.scale)
    return found


def _merged_tensors(
    path: Path, left: dict[str, tuple[Tensor, Tensor, float]], merged: MergeReport, dtype: str | None
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of one file as it is written; the layers it merges are removed from `left`."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - no dict
            weight = file.get_tensor(name)
            wanted = DTYPES[dtype] if dtype and weight.is_floating_point() else weight.dtype
            if name.endswith(KEPT_IN_FP32):
                wanted = weight.dtype
            own = name_in_language_model(name)
            if own not in left:
                yield name, weight.to(wanted)
                continue
            down, up, scale = left.pop(own)
            if weight.shape != (up.shape[0], down.shape[1]):
                raise PolicyError(
                    f"{name} is {list(weight.shape)} in the base: the adapter is another model's"
                )
            change = scale * (up @ down)
            exact = weight.float() + change
            rounded = exact.to(wanted)
            merged.add(change, exact, rounded)
            yield name, rounded


def _weight_files(base: Path) -> list[str]:
    if (base / INDEX).is_file():
        return sorted(set(json.loads((base / INDEX).read_text())["weight_map"].values()))
    return sorted(path.name for path in base.glob("*.safetensors"))


def _copy_the_rest(base: Path, to: Path, total_bytes: int, dtype: str | None) -> None:
    for pattern in _COPIED:
        for path in base.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, to / path.name)
    if dtype is not None:
        config = json.loads((to / "config.json").read_text())
        config |= {key: dtype for key in _DTYPE_KEYS if key in config} or {"dtype": dtype}
        for part in (it for it in config.values() if isinstance(it, dict)):  # text_config, vision_config
            part.update({key: dtype for key in _DTYPE_KEYS if key in part})
        (to / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if (to / INDEX).is_file():
        index = json.loads((to / INDEX).read_text())
        index["metadata"] = {**index.get("metadata", {}), "total_size": total_bytes}
        (to / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def main(arguments: Sequence[str]) -> int:
    """The command; an error is one line on stderr, and exit code 3."""
    parser = argparse.ArgumentParser(prog="runtime.trainer.merging")
    parser.add_argument("--base", required=True, help="its folder, or its name on the hub")
    parser.add_argument("--adapter", required=True, type=Path)
    parser.add_argument("--to", required=True, type=Path)
    parser.add_argument("--dtype", choices=sorted(DTYPES))
    options = parser.parse_args(arguments)
    try:
        merged = merge(resolve(options.base), options.adapter, options.to, options.dtype)
    except (PolicyError, OSError, KeyError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201 - its way of saying so
        return 3
    print(json.dumps({"layers": merged.layers, "lost_share": merged.rounding_loss}))  # noqa: T201 - the answer
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
