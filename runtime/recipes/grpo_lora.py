"""GRPO with LoRA as a torchtune recipe: takes recorded batches in order, commits a checkpoint for each.

Neighbours: the gateway writes `steps/` (or did, long ago: then this is a replay) and reads `checkpoints/`.
Knows nothing of HTTP, engines or what a reward means. Run it by itself as the YAML beside it says.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchtune import config
from torchtune.recipe_interfaces import FTRecipeInterface

from runtime.files import write_json
from runtime.metrics import MetricsLog, WandbLog
from runtime.training import policy as policies
from runtime.training import resume
from runtime.training.batch import Batch, BatchError, read_batch, step_folder
from runtime.training.checkpoint import Checkpoint, CheckpointError, CheckpointStore
from runtime.training.ranks import Ranks
from runtime.training.update import Trained, UpdateSettings, probe, update

_LOOK_SECONDS = 0.02
_NOTHING_MORE = 0
_NOTHING_YET = -1
# The other ranks wait in a collective, which gives up after minutes: they hear from the first this often.
_WORD_SECONDS = 30.0
_PROBE = "probe.safetensors"


class GRPOLoRARecipe(FTRecipeInterface):
    """One optimizer step per batch; the rename of its checkpoint is the step's commit."""

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.ranks = Ranks.join(cfg.device)
        self.output = Path(cfg.output_dir)
        self.steps = Path(cfg.steps_dir)
        self.store = CheckpointStore(Path(cfg.checkpoints_dir))
        self.metrics = MetricsLog(self.output / "metrics.jsonl")
        self.settings = UpdateSettings.of(cfg)
        self.stopping = False
        self.step = 0

    def load_checkpoint(self, **_: Any) -> Checkpoint | None:
        """The newest whole checkpoint, or None for a fresh start."""
        return self.store.newest()

    def setup(self, **_: Any) -> None:
        """Build the policy and its optimizer, and go back to the last committed step."""
        signal.signal(signal.SIGTERM, self._stop)
        self._say("loading")
        if (threads := _threads(self.cfg)) is not None:
            torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(self.cfg.device == "cpu")
        self.policy = policies.build(
            policies.resolve(str(self.cfg.model_path)),
            policies.Lora(self.cfg.lora_rank, float(self.cfg.lora_alpha)),
            dtype=self.cfg.dtype,
            device=self.ranks.device,
            seed=self.cfg.seed,
        )
        self.optimizer = torch.optim.AdamW(
            self.policy.masters.values(), lr=self.cfg.learning_rate, weight_decay=self.cfg.weight_decay
        )
        last = self.load_checkpoint()
        if last is not None:
            self._take_over(last)
            self.step = last.step
        self._open_logs(last)
        self._say("ready")

    def train(self, **_: Any) -> None:
        """Take the steps in order until there is none (or, following, until SIGTERM)."""
        while (batch := self._next()) is not None:
            self._say("training", step=batch.step)
            try:
                trained, evidence = self._restore(batch) if batch.kind == "restore" else self._update(batch)
            except (CheckpointError, policies.PolicyError, RuntimeError, ValueError) as error:
                self._fail(batch.step, error)
                raise
            if self.ranks.first:
                self._commit(batch, trained, evidence)
            self.step = batch.step
            self._say("ready")

    def save_checkpoint(self, **_: Any) -> None:
        """Nothing is left to save: every step was committed as it ended."""

    def cleanup(self, **_: Any) -> None:
        """Flush what is buffered elsewhere."""
        self.wandb.close()
        self.ranks.leave()

    def _next(self) -> Batch | None:
        """The next batch; the first rank decides whether there is one, so that all take the same."""
        step = _NOTHING_YET
        while step == _NOTHING_YET:
            step = self.ranks.agree(self._await_next() if self.ranks.first else _NOTHING_YET)
        if step == _NOTHING_MORE:
            return None
        try:
            batch = read_batch(step_folder(self.steps, step))
            if batch.step != step:
                raise BatchError(f"{step_folder(self.steps, step).name} holds step {batch.step}")
            return batch
        except BatchError as error:
            self._fail(step, error)
            raise

    def _await_next(self) -> int:
        step = self.step + 1
        until = time.monotonic() + _WORD_SECONDS
        while not self.stopping:
            # A step that failed holds no version: the gateway goes on with the next number.
            folder = step_folder(self.steps, step)
            if (folder / "failed.json").exists():
                step += 1
            elif folder.exists():
                return step
            elif not self.cfg.follow:
                break
            elif time.monotonic() > until:
                return _NOTHING_YET
            else:
                time.sleep(_LOOK_SECONDS)
        return _NOTHING_MORE

    def _update(self, batch: Batch) -> tuple[Trained, dict[str, Tensor]]:
        self.policy.check_tokens(int(batch.tokens.max()), int(np.diff(batch.offsets).max()))
        trained = update(self.policy, self.optimizer, batch, self.settings, self.ranks)
        return trained, probe(self.policy, batch)

    def _restore(self, batch: Batch) -> tuple[Trained, dict[str, Tensor]]:
        """Go back to a kept checkpoint, as a new version."""
        source = self.store.load(batch.meta["from"])
        self._take_over(source)
        return Trained({"updated": 0.0}, {}), load_file(source.folder / _PROBE)

    def _take_over(self, checkpoint: Checkpoint) -> None:
        self.policy.import_adapter(checkpoint.adapter)
        resume.load(checkpoint.folder, self.policy, self.optimizer)

    def _commit(self, batch: Batch, trained: Trained, evidence: dict[str, Tensor]) -> None:
        def write(folder: Path) -> None:
            self.policy.export_adapter(folder / "adapter", str(self.cfg.model_path))
            resume.save(folder, self.policy, self.optimizer)
            save_file(evidence, folder / _PROBE)

        state = {
            "schema": 1,
            "step": batch.step,
            "version": batch.step,
            "key": batch.meta.get("key"),
            "request_sha256": batch.meta.get("request_sha256"),
            "client_state": batch.meta.get("client_state"),
            "metrics": trained.metrics,
            "counts": trained.counts,
        }
        checkpoint = self.store.commit(batch.step, batch.step, state, write)
        line = _metrics_line(checkpoint)
        self.wandb.append(line)
        self.metrics.append(line)
        self.store.prune(self.cfg.keep_checkpoints)

    def _open_logs(self, last: Checkpoint | None) -> None:
        self.wandb = WandbLog(
            self.cfg.wandb_mode if self.ranks.first else "disabled",
            self.cfg.wandb_project,
            self.cfg.run_id,
            self.output,
            OmegaConf.to_container(self.cfg),
        )
        if self.ranks.first:
            line = None if last is None else _metrics_line(last)
            if self.metrics.resume(line) and line is not None:
                self.wandb.append(line)

    def _stop(self, *_: object) -> None:
        """SIGTERM ends between steps: a step is committed or it never was."""
        self.stopping = True

    def _fail(self, step: int, error: Exception) -> None:
        if self.ranks.first:
            write_json(
                step_folder(self.steps, step) / "failed.json", {"error": f"{type(error).__name__}: {error}"}
            )
            self._say("failed", step=step, error=str(error))

    def _say(self, state: str, *, step: int | None = None, error: str | None = None) -> None:
        if self.ranks.first:
            said = {
                "state": state,
                "pid": os.getpid(),
                "step": self.step if step is None else step,
                "error": error,
            }
            write_json(self.output / "trainer.json", said)


def _threads(cfg: DictConfig) -> int | None:
    """How many threads to compute with; None leaves torch's own choice.

    More threads than free cores is far worse than fewer: each waits, spinning, for the one that was put off.
    """
    if cfg.threads is not None:
        return int(cfg.threads)
    if cfg.device != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, len(os.sched_getaffinity(0)) // 2)


def _metrics_line(checkpoint: Checkpoint) -> dict[str, Any]:
    state = checkpoint.state
    return {
        "schema": 1,
        "step": checkpoint.step,
        "version": checkpoint.version,
        "time": checkpoint.manifest["created"],
        "metrics": state["metrics"],
        "counts": state["counts"],
    }


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    """Entry point of `tune run`."""
    recipe = GRPOLoRARecipe(cfg)
    recipe.setup()
    recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    sys.exit(recipe_main())  # pyright: ignore[reportCallIssue]
