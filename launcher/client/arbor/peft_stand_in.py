"""The module that `import peft` finds under `launch --arbor` where PEFT is not installed: LoraConfig alone.

Arbor's scripts describe their LoRA by it (`lora_config` in train_kwargs), and the run compares it with its
own. Neighbours: `supplied_names.py` offers it.
"""

from __future__ import annotations

from typing import Any

from launcher.client.arbor.stderr_log import log_once

__all__ = ["LoraConfig"]


class LoraConfig:
    """The keywords it was made with, as attributes; rank and alpha are PEFT's where they are not given."""

    def __init__(self, *, r: int = 8, lora_alpha: int = 8, **others: Any) -> None:
        self.__dict__ |= {"r": r, "lora_alpha": lora_alpha, **others}

    def to_dict(self) -> dict[str, Any]:
        """As PEFT's, so that every keyword is compared."""
        return dict(vars(self))

    def __repr__(self) -> str:
        return f"LoraConfig({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


log_once("PEFT is not installed: `peft` has LoraConfig alone, which is all that train_kwargs need")
