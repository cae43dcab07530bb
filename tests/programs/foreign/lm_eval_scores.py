"""Scores continuations by lm-evaluation-harness; prints their loglikelihoods, and whether each is greedy.

LAUNCH_BASE_URL=… LAUNCH_API_KEY=… python lm_eval_scores.py PAIRS_JSON
"""

from __future__ import annotations

import json
import os
import sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

os.environ["OPENAI_API_KEY"] = key = os.environ["LAUNCH_API_KEY"]
model = LocalCompletionsAPI(
    base_url=f"{os.environ['LAUNCH_BASE_URL']}/completions", model="policy", auth_token=key, batch_size=3
)
requests = [
    Instance(request_type="loglikelihood", doc={}, arguments=tuple(pair), idx=place)
    for place, pair in enumerate(json.loads(sys.argv[1]))
]
found = model.loglikelihood(requests, disable_tqdm=True)
print(json.dumps({"tokenizer": model.tokenizer_backend, "scores": found}))
