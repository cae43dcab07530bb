"""Keywords without an effect here, each with one line about the behaviour here.

Neighbours: `table.py` lists them. A value that matches that behaviour is not noted.
"""

from __future__ import annotations

from typing import Any

from runtime.shared.train_kwargs.translation import Handler, Translation

_ONE_UPDATE = "no effect on the update: all samples of a step make one, packed into rows as memory allows"
_SAVED = "each step is a checkpoint, and so many of the last are kept as train.keep_checkpoints says"
_LOGGED = "each step is logged, in metrics.jsonl of the run's folder"
_FOLDER = "the adapter is copied into the run's folder (LAUNCH_RUN_DIR)"
_VALIDATED = "GRPO(num_steps_for_val=…) says when the valset is scored"
_NUM_THREADS = "num_threads says how many rollouts are under way at once"
_ENGINES = "the run has engines of its own"
_OPTIMIZER = "the optimizer is AdamW, with PyTorch's own betas and epsilon"
_DATA = "there is no dataset here: a step learns from its own rollouts"
_ONE_MACHINE = "the run says how its trainer is spread over its GPUs"
_HUB = "nothing is uploaded: the adapter is copied into the run's folder"
_PLAIN_LOSS = "no effect: the loss is what loss_type and the run's train. keys say"
_PROMPT = "only what the policy sampled is trained, never a prompt or another's words"
_FULL = "the model's own weights stay as they are: an adapter is trained"
_REFERENCE = "the reference is the model without its adapter"

_TEXTS: dict[str, str] = {
    "max_steps": "it counts Arbor's groups; num_train_steps says how many steps there are",
    "num_train_epochs": "num_train_steps says how many steps there are",
    "num_generations": "num_rollouts_per_grpo_step says how many rollouts are compared",
    "run_name": "a run has its name from when it starts, with --name",
    "async_generation_timeout": "rollout_seconds says how long one rollout may take",
    "lr_scheduler_kwargs": "linear and cosine fall to 0 at the last step",
    "gradient_checkpointing_kwargs": "layers compute their insides again whole, where memory asks for it",
    "vllm_gpu_memory_utilization": "memory is planned when a run starts (--set engine.memory_fraction=0.5)",
    "wandb_project": "a run has its project from when it starts (--set wandb_project=slipway)",
    **dict.fromkeys(
        ("per_device_train_batch_size", "gradient_accumulation_steps", "auto_find_batch_size", "packing",
         "padding_free", "steps_per_generation", "train_batch_size", "batch_size"), _ONE_UPDATE),
    **dict.fromkeys(("save_steps", "save_strategy", "save_total_limit", "save_only_model"), _SAVED),
    **dict.fromkeys(
        ("logging_steps", "logging_strategy", "logging_first_step", "logging_dir", "disable_tqdm",
         "log_level", "log_unique_prompts", "num_completions_to_print"), _LOGGED),
    **dict.fromkeys(("output_dir", "overwrite_output_dir", "resume_from_checkpoint"), _FOLDER),
    **dict.fromkeys(
        ("eval_strategy", "evaluation_strategy", "eval_steps", "per_device_eval_batch_size"), _VALIDATED),
    **dict.fromkeys(
        ("generation_batch_size", "max_concurrent", "max_data_workers", "async_max_queue_size"),
        _NUM_THREADS),
    **dict.fromkeys(
        ("vllm_mode", "vllm_server_host", "vllm_server_port", "vllm_server_base_url", "vllm_server_timeout",
         "vllm_tensor_parallel_size", "vllm_enable_sleep_mode", "control_endpoint", "model_init_kwargs",
         "generation_kwargs", "cache_implementation", "ds3_gather_for_generation"), _ENGINES),
    **dict.fromkeys(("optim", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_args"), _OPTIMIZER),
    **dict.fromkeys(
        ("shuffle_dataset", "remove_unused_columns", "dataloader_num_workers", "dataloader_drop_last",
         "dataloader_pin_memory", "dataset_text_field", "dataset_num_proc", "group_by_length"), _DATA),
    **dict.fromkeys(
        ("deepspeed", "fsdp", "fsdp_config", "ddp_find_unused_parameters", "ddp_timeout", "accelerate_config",
         "device", "device_map", "tf32", "torch_compile"), _ONE_MACHINE),
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id", "hub_token", "hf_token", "hf_config", "hub_strategy"), _HUB),
    **dict.fromkeys(
        ("use_liger_loss", "use_liger_kernel", "top_entropy_quantile", "reward_weights",
         "zero_truncated_completions", "label_smoothing_factor"), _PLAIN_LOSS),
    **dict.fromkeys(("mask_env_responses", "assistant_only_loss", "completion_only_loss"), _PROMPT),
    **dict.fromkeys(("ref_model_mixup_alpha", "ref_model_sync_steps"), _REFERENCE),
}  # fmt: skip
# The value that matches the behaviour here, and the note for another value.
_NEUTRAL_VALUES: dict[str, tuple[Any, str]] = {
    "num_iterations": (1, "each sample is trained once"),
    "use_peft": (True, _FULL),
    "use_vllm": (True, _ENGINES),
    "vllm_importance_sampling_correction": (True, "between engine and trainer it is always made"),
    "sync_ref_model": (False, _REFERENCE),
    "disable_dropout": (True, "there is no dropout here"),
    "vllm_guided_decoding_regex": ("", "rollouts sample from the unchanged policy"),
}


def _note(text: str) -> Handler:
    def act(reading: Translation, name: str, value: Any) -> None:
        reading.note(name, text)

    return act


def _note_unless(own: Any, text: str) -> Handler:
    def act(reading: Translation, name: str, value: Any) -> None:
        if value != own or isinstance(value, bool) != isinstance(own, bool):
            reading.note(name, text)

    return act


def _report_to(reading: Translation, name: str, value: Any) -> None:
    wanted = {str(it) for it in value} if isinstance(value, list) else {str(value)}
    if wanted & {"wandb", "all"} and reading.run.config.wandb_mode == "disabled":
        reading.note(name, "W&B gets nothing of this run, which was started without --wandb online")
    elif wanted == {"trackio"}:
        reading.note(name, "Trackio gets this run if it was started with --trackio")
    elif others := wanted - {"wandb", "all", "none"}:
        reading.note(name, f"not to {', '.join(sorted(others))}: {_LOGGED}")


def _log_completions(reading: Translation, name: str, value: Any) -> None:
    count = reading.run.config.logged_rollouts
    if value and not count:
        reading.note(name, "none are kept in this run (--set logged_rollouts=64)")
    elif value:
        reading.note(name, f"those of {count} rollouts a step are copied as text into the run's folder")


IGNORED: dict[str, Handler] = {
    "report_to": _report_to,
    "log_completions": _log_completions,
    **{name: _note(text) for name, text in _TEXTS.items()},
    **{name: _note_unless(own, text) for name, (own, text) in _NEUTRAL_VALUES.items()},
}
