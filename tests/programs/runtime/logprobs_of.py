"""What transformers and peft make of folders, in the runtime's environment: `logprobs_of.py IDS FOLDER…`.

Prints for each folder the logprob of each id but the first, given those before it. Shares no code with the
runtime.
"""

import json
import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def logprobs(folder: Path, ids: torch.Tensor) -> list[float]:
    if (folder / "adapter_config.json").exists():
        said = json.loads((folder / "adapter_config.json").read_text())
        base = AutoModelForCausalLM.from_pretrained(said["base_model_name_or_path"], dtype=torch.float32)
        model = PeftModel.from_pretrained(base, str(folder))
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype == torch.float32, model.dtype
    with torch.no_grad():
        all_logprobs = model.eval()(ids).logits.float().log_softmax(-1)
    return all_logprobs[0, :-1].gather(-1, ids[0, 1:, None])[:, 0].tolist()


asked = torch.tensor([json.loads(sys.argv[1])])
print(json.dumps([logprobs(Path(folder), asked) for folder in sys.argv[2:]]))
