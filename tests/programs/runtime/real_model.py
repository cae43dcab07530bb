"""Makes a folder of a small pre-trained model out of its GGUF file: `real_model.py FILE.gguf FOLDER`.

transformers reads such a file and would not save what it read as a model without quantization: its weights go
into a fresh one of the same shape.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def main(file: Path, folder: str) -> None:
    read = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    said = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**said | {"rms_norm_eps": 1e-5}))
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
