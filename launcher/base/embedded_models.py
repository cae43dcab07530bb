"""The models that come with launch: their names, what they know, their folders, the settings they learn with.

Neighbours: `runtime/tiny` holds one, `examples/tiny_model` makes it. Reads no file of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# `runtime` is beside `launcher`. A program's own `runtime.py` would take the place of an import here.
_RUNTIME = Path(__file__).parents[2] / "runtime"


@dataclass(frozen=True)
class _EmbeddedModel:
    """`package`: the folder of `runtime/` with `model/` and `settings.toml`. `instead`: the value of
    `--model` for a program that asks for more than it knows."""

    package: str
    knows: str
    instead: str


_MODELS = {
    "tiny": _EmbeddedModel(
        "tiny", "the French of phrases such as `the green house`", "HuggingFaceTB/SmolLM2-135M-Instruct"
    ),
}
NAMES = tuple(_MODELS)


def is_embedded(model: str) -> bool:
    """Whether the value of `--model` names one of them."""
    return model in _MODELS


def folder_of(model: str) -> Path:
    """The folder of a value of `--model`: an embedded model's, else the value as a path, which a hub name
    is not."""
    return _package(model) / "model" if is_embedded(model) else Path(model).expanduser()


def settings_file(model: str) -> Path:
    """The settings of a run on this embedded model where nobody says otherwise."""
    return _package(model) / "settings.toml"


def asks_for_more(folder: str) -> str | None:
    """What to say of a program that the model in this folder, here or on a machine, cannot do; None of a
    model that is not embedded."""
    for name, it in _MODELS.items():
        if Path(folder).parts[-3:] == (_RUNTIME.name, it.package, "model"):
            asked = "and this program seems to ask for more"
            return f"{name} knows {it.knows}, {asked}: launch --model {it.instead}"
    return None


def _package(model: str) -> Path:
    return _RUNTIME / _MODELS[model].package
