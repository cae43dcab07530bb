"""Scores sampled token ids with `peft` + `transformers` and the pulled adapter (runtime's environment).

`python -m tests.support.adapter_check MODEL ADAPTER < samples.jsonl` prints one JSON object. Each line of
input: {"prompt": [ids], "completion": [ids], "logprobs": [as served]}. Knows nothing of our own policy code:
that is its point.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(model_path: str, adapter_path: str) -> None:
    """Compare served logprobs with peft's, in fp32 and with the base in bf16."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # two that share their processors with others wait for each other, spinning
    samples = [json.loads(line) for line in sys.stdin]
    found: dict[str, Any] = {"tokens": sum(len(sample["completion"]) for sample in samples)}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        base = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype)
        model = PeftModel.from_pretrained(base, adapter_path).to(dtype).eval()
        served = torch.tensor([value for sample in samples for value in sample["logprobs"]])
        policy = torch.cat([_logprobs(model, sample) for sample in samples])
        with model.disable_adapter():
            reference = torch.cat([_logprobs(model, sample) for sample in samples])
        found[name] = {
            "max_delta": (policy - served).abs().max().item(),
            "mean_delta": (policy - served).abs().mean().item(),
            "mean_policy_minus_base": (policy - reference).abs().mean().item(),
        }
    print(json.dumps(found))


def _logprobs(model: Any, sample: dict[str, Any]) -> Any:
    """Logprobs [completion] of the completion's ids at temperature 1."""
    import torch

    ids = torch.tensor([sample["prompt"] + sample["completion"]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(sample["prompt"]) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, ids[0, len(sample["prompt"]) :, None])[:, 0]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
