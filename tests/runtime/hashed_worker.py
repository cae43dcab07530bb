"""Our part of vLLM's worker, with one question more that only a test asks."""

from __future__ import annotations

import hashlib

import torch

from runtime.engine.worker import WorkerExtension


class HashedWorker(WorkerExtension):
    """Mixed into vLLM's worker by hashed_engine.py."""

    def base_sha256(self) -> str:
        """Of every weight that is no adapter's."""
        digest = hashlib.sha256()
        for name, weight in sorted(self.model_runner.model.named_parameters()):
            digest.update(name.encode())
            digest.update(weight.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return digest.hexdigest()
