"""The names of the run's model, and whether a given name means it.

Neighbours: the gateway's versions answer to these names, `train_kwargs/` compares with them. Pure text:
checks on no hub and no disk whether there is such a model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from runtime.shared.peft_format import portable_name
from runtime.shared.runtime_config import RuntimeConfig

# `name:latest`, `name:novita`: whose server it was, or which of its files.
_TAG = re.compile(r":[\w.-]+$")


@dataclass(frozen=True)
class ModelNames:
    """`own` is the model's hub name, or of a local folder its last part; `path` is its place in the run."""

    own: str
    path: str

    @classmethod
    def of(cls, config: RuntimeConfig) -> Self:
        """The names of the model that this run trains."""
        return cls(config.model_name or portable_name(config.model_path), config.model_path)

    def has(self, name: str) -> bool:
        """Whether the name means this model: in any case, with a tag, as a folder anywhere.

        A folder is known by its last part, as it has another place on another machine: there its hub name
        means it too.
        """
        plain_name = _plain(name)
        if plain_name in {_plain(self.own), _plain(self.path)}:
            return True
        is_folder = name.startswith(("/", "./", "../", "~")) or "/" not in self.own
        return is_folder and plain_name.rpartition("/")[2] == _plain(self.own).rpartition("/")[2]


def _plain(name: str) -> str:
    return _TAG.sub("", name.strip().rstrip("/")).lower()
