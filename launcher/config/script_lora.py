"""The LoRA that an Arbor script asks for, read from its text: a run's own is made when its engines start.

Only what is written out is read: `LoraConfig(r=8)`, or a dict as `lora_config`. A value that is computed, or
two that differ, are left to the run, which refuses them with the line to start again. Neighbours:
`setting_sources.py` makes it the last of the sources. Nothing of the script is executed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard

# PEFT's words, and ours.
_SETTINGS = {
    "r": "train.lora.rank",
    "lora_alpha": "train.lora.alpha",
    "use_rslora": "train.lora.use_rslora",
    "target_modules": "train.lora.target_modules",
}
# PEFT's own values of those that a LoraConfig leaves out.
_DEFAULTS = {"r": 8, "lora_alpha": 8}
_KEYS = ("lora_config", "peft_config")


def script_of(command: Sequence[str]) -> str | None:
    """The command's first Python file, as it was typed."""
    return next((word for word in command if word.endswith(".py")), None)


def settings_of(script: Path) -> dict[str, Any]:
    """The settings by their keys, as far as the script says them in only one way."""
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):  # whoever runs it says so
        return {}
    found: dict[str, list[Any]] = {}
    for config in _configs(tree):
        for key in _SETTINGS.keys() & config.keys():
            found.setdefault(key, []).append(_value(config[key]))
    return {
        _SETTINGS[key]: values[0]
        for key, values in found.items()
        if values[0] is not None and values == values[:1] * len(values)
    }


def _configs(tree: ast.Module) -> Iterator[dict[str, ast.expr]]:
    """Each LoRA configuration, its values by their keys."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) == "LoraConfig":
            given = {it.arg: it.value for it in node.keywords if it.arg is not None}
            if len(given) == len(node.keywords):  # no **of_another_place
                yield {key: ast.Constant(value) for key, value in _DEFAULTS.items()} | given
        elif isinstance(node, ast.Dict):
            yield from (_entries(value) for key, value in _entries(node).items() if key in _KEYS)
        elif _is_named(node):
            yield _entries(node.value)


def _is_named(node: ast.AST) -> TypeGuard[ast.keyword | ast.Assign]:
    """Whether it gives a value to one of the keys."""
    if isinstance(node, ast.keyword):
        return node.arg in _KEYS
    return isinstance(node, ast.Assign) and any(_name(it) in _KEYS for it in node.targets)


def _entries(node: ast.expr) -> dict[str, ast.expr]:
    """The entries of a dict that is written out; none of anything else."""
    if not isinstance(node, ast.Dict):
        return {}
    pairs = zip(node.keys, node.values, strict=True)
    return {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}


def _value(node: ast.expr) -> Any:
    """None for what is computed."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    if isinstance(value, str):  # all layers, which a run has by itself, or a pattern, which none has
        return None
    return list(value) if isinstance(value, tuple) else value


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
