"""GRPO, or plain imitation, with LoRA as a torchtune recipe: takes recorded batches in order, commits each.

Neighbours: the gateway writes `steps/` (or did, long ago: then this is a replay) and reads `checkpoints/`.
Knows nothing of HTTP or engines. The YAML beside it has the command to run it by itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchtune import config
from torchtune.recipe_interfaces import FTRecipeInterface

from runtime.recipes.command import recipe_keys
from runtime.shared import failpoints
from runtime.shared.batch import Batch, BatchError, read_batch, restored_from, step_folder
from runtime.shared.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    checkpoint_name,
    served_checkpoint_names,
)
from runtime.shared.json_files import write_json
from runtime.shared.metrics import MetricsLog, line_of
from runtime.shared.peft_format import portable_name
from runtime.shared.probe_file import PROBE_FILE
from runtime.shared.start_adapter_layout import START
from runtime.shared.statuses import NOT_COMMITTED
from runtime.shared.step_settings import SettingsError, UpdateSettings, run_settings
from runtime.shared.train_config import TrainConfig
from runtime.shared.wandb_log import WandbLog
from runtime.trainer import optimizer_state, parity_export
from runtime.trainer import policy as policies
from runtime.trainer.crash_counter import CrashCounter, TooManyCrashesError
from runtime.trainer.disk_retry import retry_while_disk_full
from runtime.trainer.next_step import NextStep
from runtime.trainer.old_logprobs import PolicyHistory
from runtime.trainer.probe_logprobs import compute_probe_logprobs, fallback_probe_batch
from runtime.trainer.ranks import RankLostError, Ranks, thread_count
from runtime.trainer.sft import sft_step
from runtime.trainer.step_state import state_of
from runtime.trainer.update import StepResult, update

# Errors that refuse a batch, before anything is computed.
_REFUSALS = (BatchError, CheckpointError, SettingsError, policies.PolicyError, TooManyCrashesError)
_log = logging.getLogger(__name__)


class _RefusedByOtherRankError(BatchError):
    """Another process of the trainer refused the batch, and reports the reason."""


class GRPOLoRARecipe(FTRecipeInterface):
    """One optimizer step per batch; the rename of its checkpoint is the step's commit."""

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.ranks = Ranks.join(cfg.device)
        self.output = Path(cfg.output_dir)
        self.steps = Path(cfg.steps_dir)
        self.store = CheckpointStore(Path(cfg.checkpoints_dir))
        self.metrics = MetricsLog(self.output / "metrics.jsonl")
        self.crashes = CrashCounter(self.output / "tries.json", self.ranks)
        self.train_config = run_settings(cfg)
        self.settings = UpdateSettings.of(cfg)
        self.stopping = False
        self.next = NextStep(
            self.steps,
            self.ranks,
            cfg.follow,
            lambda: self.stopping,
            lambda: self.wandb.log_new_validations(),
        )
        # A run has its pins; a replay has none, and knows the steps it will go back to.
        self.restore_sources = set[str]() if cfg.follow else restored_from(self.steps)
        self.step = 0
        # Sums over all committed steps.
        self.counters: dict[str, int] = {}
        # Whether policy and optimizer are those of the last commit.
        self.is_at_commit = True

    def load_checkpoint(self, **_: Any) -> Checkpoint | None:
        """The newest whole checkpoint, or None for a fresh start."""
        return self.store.newest()

    def setup(self, **_: Any) -> None:
        """Build the policy and its optimizer, and go back to the last committed step."""
        signal.signal(signal.SIGTERM, self._stop)
        if self.ranks.is_rank_zero:
            self.output.mkdir(parents=True, exist_ok=True)
            OmegaConf.save(self.cfg, self.output / "recipe.yaml")  # a replay begins with it
        self._report_state("loading")
        if (count := thread_count(self.cfg.threads, self.cfg.device)) is not None:
            torch.set_num_threads(count)
        torch.use_deterministic_algorithms(self.cfg.device == "cpu")
        model = policies.resolve(str(self.cfg.model_path))
        lora = self.train_config.lora
        self.policy = policies.build(
            model,
            policies.Lora(lora.rank, lora.alpha, lora.use_rslora, lora.target_modules or ()),
            dtype=self.cfg.dtype,
            device=self.ranks.device,
            seed=self.train_config.seed,
            recompute=bool(self.train_config.activation_checkpointing),
        )
        if self.cfg.follow and self.cfg.admit and self.ranks.is_rank_zero:
            parity_export.export_parity_check(
                self.policy, self.output, str(self.cfg.admit), model, self._base_name()
            )
        self.optimizer = torch.optim.AdamW(
            self.policy.master_weights.values(),
            lr=self.settings.learning_rate,
            weight_decay=self.settings.weight_decay,
        )
        self.optimizer.register_step_pre_hook(self._before_optimizer_step)
        self.optimizer.register_step_post_hook(lambda *_: failpoints.failpoint("trainer.stepped"))
        last = self.load_checkpoint()
        if last is not None:
            self._load_state(last)
            self.step = last.step
            self.counters = last.state.get("counters", {})
        self.is_at_commit = True
        self._open_logs(last)
        self._report_state("ready")
        _log.info("ready after step %d", self.step)

    def train(self, **_: Any) -> None:
        """Take the steps in order until there is none (or, following, until SIGTERM).

        A step that cannot be done fails alone while the policy is still that of the last commit. Where it is
        not, or may not be the same in every process, the process ends: the next one starts from that commit.
        """
        while (step := self.next.after(self.step)) is not None:
            self._report_state("training", step=step)
            try:
                batch = self._read_batch(step)
            except _REFUSALS as error:
                self._record_failure(step, error)
                self.ranks.any(True)  # no process looks for the next step before the reason is written
                continue
            done = self._run_step(batch)
            if done is None:
                self._release_memory()
                continue
            if self.ranks.is_rank_zero:
                self._commit(batch, *done)
            self.is_at_commit = True
            self.step = step
            self._report_state("ready")

    def save_checkpoint(self, **_: Any) -> None:
        """Nothing is left to save: every step was committed as it ended."""

    def cleanup(self, **_: Any) -> None:
        """Flush buffered logs."""
        self.wandb.close()
        self.ranks.leave()

    # ------------------------------------------------------------------ the step

    def _read_batch(self, step: int) -> Batch:
        """The step's batch. Raises one of `_REFUSALS` in every process when any of them refuses it."""
        try:
            batch = read_batch(step_folder(self.steps, step))
            if batch.step != step:
                raise BatchError(f"{step_folder(self.steps, step).name} holds step {batch.step}")
            if batch.kind == "restore" and batch.meta["from"] == START:
                self.policy.check_adapter(self._initial_adapter())
            elif batch.kind == "restore":
                self.store.load(batch.meta["from"])
            else:
                self.policy.check_tokens(int(batch.tokens.max()), int(np.diff(batch.offsets).max()))
                batch = self.policy.grammar_masks.checked(batch)
                UpdateSettings.of(self.cfg, batch.meta)
        except _REFUSALS:
            self.ranks.any(True)
            raise
        if self.ranks.any(False):
            raise _RefusedByOtherRankError(f"step {step}: another trainer process refused it")
        if batch.kind != "restore":
            self.crashes.begin(step)
        return batch

    def _run_step(self, batch: Batch) -> tuple[StepResult, dict[str, Tensor]] | None:
        """Do the step; None when it failed and the policy is still as committed, else it raises."""
        try:
            failpoints.failpoint("trainer.read")
            return self._restore(batch) if batch.kind == "restore" else self._update(batch)
        except RankLostError as error:  # the lost rank reports the reason, or the retry is counted
            self._report_state("failed", step=batch.step, error=str(error))
            raise
        except Exception as error:
            self._record_failure(batch.step, error)
            if not self.is_at_commit or self.ranks.size > 1:
                self._report_state("failed", step=batch.step, error=str(error))
                raise
        return None

    def _release_memory(self) -> None:
        """Release the memory of a failed step: its error, whose frames held it, is gone by now."""
        self.policy.zero_grad()
        if self.ranks.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def _update(self, batch: Batch) -> tuple[StepResult, dict[str, Tensor]]:
        if not self.ranks.is_rank_zero:
            failpoints.failpoint("rank.training")
        settings = UpdateSettings.of(self.cfg, batch.meta)
        for group in self.optimizer.param_groups:
            group |= {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
        if batch.kind == "supervised":
            trained = sft_step(self.policy, self.optimizer, batch, settings, self.ranks)
        else:
            history = PolicyHistory(self.step, self._adapter_of)
            trained = update(self.policy, self.optimizer, batch, settings, self.ranks, history)
        return trained, compute_probe_logprobs(self.policy, batch) if self.ranks.is_rank_zero else {}

    def _adapter_of(self, version: int) -> Path | None:
        """Where a version's adapter is, of those kept by number alone: a replay knows no pins."""
        name, names = checkpoint_name(version), self.store.names()
        if name not in names or len(names) - names.index(name) > self.train_config.keep_checkpoints:
            return None
        try:
            return self.store.load(name).adapter
        except CheckpointError as error:
            _log.warning("the adapter of version %d is not there to compare with: %s", version, error)
            return None

    def _restore(self, batch: Batch) -> tuple[StepResult, dict[str, Tensor]]:
        """Go back to a kept checkpoint, as a new version; or begin with the adapter the run was given."""
        if batch.meta["from"] == START:
            self.is_at_commit = False
            self.policy.import_adapter(self._initial_adapter())
            self.optimizer.state.clear()
            return StepResult({"updated": 0.0}, {}), compute_probe_logprobs(
                self.policy, fallback_probe_batch(self.policy)
            )
        source = self.store.load(batch.meta["from"])
        self._load_state(source)
        return StepResult({"updated": 0.0}, {}), load_file(source.folder / PROBE_FILE)

    def _initial_adapter(self) -> Path:
        if self.cfg.init_adapter is None:
            raise BatchError("the run began with an adapter: init_adapter does not say where it is")
        return Path(self.cfg.init_adapter)

    def _load_state(self, checkpoint: Checkpoint) -> None:
        self.is_at_commit = False
        self.policy.import_adapter(checkpoint.adapter)
        optimizer_state.load(checkpoint.folder, self.policy, self.optimizer)

    def _before_optimizer_step(self, *_: Any) -> None:
        """Called by the optimizer as its step begins: gradients are whole, masters about to change."""
        self.is_at_commit = False
        self.crashes.reset()
        failpoints.failpoint("trainer.backward")

    # ------------------------------------------------------------------ the commit

    def _commit(self, batch: Batch, trained: StepResult, probe: dict[str, Tensor]) -> None:
        def write(folder: Path) -> None:
            self.policy.export_adapter(folder / "adapter", self._base_name())
            failpoints.failpoint("checkpoint.writing")
            optimizer_state.save(folder, self.policy, self.optimizer)
            failpoints.failpoint("checkpoint.writing")
            save_file(probe, folder / PROBE_FILE)
            failpoints.failpoint("checkpoint.writing")

        counters = trained.added_to_counters(self.counters, batch.empty_before)
        state = state_of(batch, step_folder(self.steps, batch.step).name, trained, counters)
        checkpoint = retry_while_disk_full(
            lambda: self.store.commit(batch.step, batch.step, state, write),
            lambda: self.stopping,
            self._report_disk_full,
        )
        self.counters = counters
        failpoints.failpoint("trainer.committed")
        _log.info("step %d is committed", batch.step)
        line = line_of(checkpoint.manifest, checkpoint.state)
        self.wandb.append(line)
        self.metrics.append(line)
        failpoints.failpoint("trainer.logged")
        # The next versions may be waiting for their proof still.
        self.store.prune(
            self.train_config.keep_checkpoints, self.restore_sources | served_checkpoint_names(self.output)
        )

    def _base_name(self) -> str:
        return self.cfg.base_model_name or portable_name(str(self.cfg.model_path))

    def _report_disk_full(self, error: Exception) -> None:
        _log.warning("step %d is computed, but not committed yet: %s", self.step + 1, error)
        self._report_state("training", error=f"{NOT_COMMITTED}: {error}")

    # ------------------------------------------------------------------ reports

    def _open_logs(self, last: Checkpoint | None) -> None:
        self.wandb = WandbLog(
            self.cfg.wandb_mode,
            self.cfg.wandb_project,
            self.cfg.run_id,
            self.output,
            OmegaConf.to_container(self.cfg),
            self.step,
            self.cfg.wandb_completions,
            self.cfg.wandb_name,
            is_rank_zero=self.ranks.is_rank_zero,
        )
        line = None if last is None else line_of(last.manifest, last.state)
        if self.ranks.is_rank_zero and self.metrics.reconcile(line) and line is not None:
            self.wandb.append(line, maybe_logged=True)

    def _stop(self, *_: object) -> None:
        """SIGTERM ends between steps: a step is committed or it never was."""
        self.stopping = True
        self.crashes.on_sigterm()

    def _record_failure(self, step: int, error: Exception) -> None:
        """Report it where the gateway looks, and never take this step again. Any process may know why."""
        _log.error("step %d failed", step, exc_info=error)
        if not isinstance(error, _RefusedByOtherRankError):
            write_json(
                step_folder(self.steps, step) / "failed.json",
                {"error": f"{type(error).__name__}: {error}"},
                durable=True,
            )

    def _report_state(self, state: str, *, step: int | None = None, error: str | None = None) -> None:
        if self.ranks.is_rank_zero:
            step = self.step if step is None else step
            status = {"state": state, "pid": os.getpid(), "step": step, "error": error}
            with contextlib.suppress(OSError):  # a full disk: a missing report must not fail the step
                write_json(self.output / "trainer.json", status)


def with_defaults(cfg: DictConfig) -> DictConfig:
    """A recipe's keys with the defaults of those it lacks, as an older run's recipe.yaml lacks newer ones."""
    own = OmegaConf.load(Path(__file__).parent / "configs" / "grpo_lora.yaml")
    return cast("DictConfig", OmegaConf.merge(own, recipe_keys(TrainConfig()), cfg))


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    """Entry point of `tune run`."""
    logging.basicConfig(format="%(asctime)s %(message)s")
    _log.setLevel(logging.INFO)
    try:
        recipe = GRPOLoRARecipe(with_defaults(cfg))
        recipe.setup()
    except (SettingsError, policies.PolicyError) as error:
        sys.exit(f"cannot train: {error}")
    recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    sys.exit(recipe_main())
