"""`launch export`: writes an adapter of a run into a folder, alone or merged into its base model.

Neighbours: `results/run_weights.py` finds the adapter; `runtime/trainer/merging.py`, run in the runtime's own
environment, merges. Knows nothing of tensors. The folder is complete or absent.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launcher.base import credentials, embedded_models
from launcher.base.errors import EXIT_OK, LaunchError, PreflightError, UsageError
from launcher.base.home import Home
from launcher.base.log import REDACTOR
from launcher.base.module_command import module_command
from launcher.console.output import Output
from launcher.records.records import RecordStore
from launcher.results import run_weights
from launcher.results.run_weights import RunWeights
from runtime.shared.language_model import OTHER_MODULES
from runtime.shared.peft_format import engine_rank

_CONFIG = "adapter_config.json"
_FILES = (_CONFIG, "adapter_model.safetensors")
DTYPES = ("float32", "bfloat16", "float16")
_ON_WHOLE_MODEL = " In transformers load the base with AutoModelForImageTextToText."
# If rounding takes more than this share of the adapter's change in a merge, a warning is shown.
_LARGE_ROUNDING_LOSS = 0.05


def export(output: Output, text: str, to: str, merge: bool, dtype: str | None, env_file: Path | None) -> int:
    """Write it into `to`, which must not hold anything yet. Raises LaunchError."""
    if dtype is not None and (not merge or dtype not in DTYPES):
        raise UsageError(
            f"--dtype {dtype}: " + ("only a merged model has one" if not merge else "no such type"),
            "an adapter is always float32" if not merge else f"the types are {', '.join(DTYPES)}",
            f"launch export {text} --to {to} --merge --dtype float32",
        )
    home = Home.find()
    weights = run_weights.find_weights(RecordStore(home), text)
    base = base_of(weights)
    target = Path(to).expanduser().absolute()
    type_of = dtype or dtype_of(weights)
    serve = _serve_line(weights, base, target, merged=merge, dtype=type_of)
    with _atomic_folder(target) as folder:
        if merge:
            found = _merge(output, home, weights, base, folder, type_of, env_file)
        else:
            found = _copy(weights, base, folder)
        (folder / "README.md").write_text(_card(weights, base, serve, merged=merge))
    data = {"into": str(target), "run": weights.record.id, "step": weights.step, "base": base, **found}
    kind = "model" if merge else "adapter"
    text = f"{target}: the {kind} of {weights.label}, base {base}\nIn vLLM: {serve}"
    output.result(data | {"serve": serve}, text)
    return EXIT_OK


def base_of(weights: RunWeights) -> str:
    """Its base as this computer finds it: a hub name or an absolute folder."""
    model = weights.record.details.get("settings", {}).get("model")
    if model is not None and embedded_models.is_embedded(model):
        return str(embedded_models.folder_of(model))
    return str(weights.record.details.get("model_path") or model)


def dtype_of(weights: RunWeights) -> str:
    """The dtype that its run computed in, so that the export answers as the run did."""
    details = weights.record.details
    default = "bfloat16" if details.get("settings", {}).get("gpus") else "float32"
    return str(details.get("runtime", {}).get("dtype") or default)


@contextmanager
def _atomic_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside the target; it takes the target's place once it is complete."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} is not empty", "existing files are never overwritten", f"ls -l {target}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as beside:
            folder = Path(beside) / target.name
            folder.mkdir()
            yield folder
            if target.exists():
                target.rmdir()
            folder.rename(target)
    except OSError as error:
        raise PreflightError(
            f"cannot write {target}", error.strerror or str(error), f"df -h {target.parent}"
        ) from error


def _copy(weights: RunWeights, base: str, folder: Path) -> dict[str, Any]:
    """The adapter, which names its base so that peft finds it from here."""
    for name in _FILES:
        shutil.copyfile(weights.folder / name, folder / name)
    config = json.loads((folder / _CONFIG).read_text())
    (folder / _CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": base}, indent=2) + "\n")
    return {"merged": False}


def _merge(
    output: Output,
    home: Home,
    weights: RunWeights,
    base: str,
    folder: Path,
    dtype: str,
    env_file: Path | None,
) -> dict[str, Any]:
    """Run the merge where torch is: in the runtime's environment, built first where it is missing."""
    from runtime import bootstrap

    with output.busy(f"merging {weights.label} into {base}") as progress:
        try:
            python = bootstrap.ensure_environment(home.environments, "cpu", progress=progress)
        except bootstrap.BootstrapError as error:
            raise PreflightError(
                "the runtime's environment could not be built", str(error), "launch doctor"
            ) from error
        words = ["--base", base, "--adapter", str(weights.folder), "--to", str(folder), "--dtype", dtype]
        with tempfile.TemporaryDirectory(prefix="slipway-merge-") as alone:
            # Of ours the runtime alone: beside it may lie packages that are not that environment's.
            Path(alone, "runtime").symlink_to(Path(bootstrap.__file__).parent)
            done = subprocess.run(
                [*module_command("runtime.trainer.merging", python), *words],
                cwd=alone,
                env=_environ(env_file) | {"PYTHONPATH": alone},
                capture_output=True,
                text=True,
                check=False,
            )
    if done.returncode:
        raise _merge_error(weights, base, done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    if found["lost_share"] > _LARGE_ROUNDING_LOSS:
        kept = max(0.0, 1 - found["lost_share"])
        output.note(
            f"rounded to {dtype}, the merged weights keep about {kept:.0%} of what the adapter changes; "
            "--dtype float32 keeps all of it, and so does the adapter alone"
        )
    return {"merged": True, "dtype": dtype, **found}


def _environ(env_file: Path | None) -> dict[str, str]:
    """A runtime's environment, with the hub's token for a base that must be downloaded."""

    read = credentials.read_dotenv(env_file, Path.cwd()).variables
    token = os.environ.get("HF_TOKEN") or read.get("HF_TOKEN")
    return credentials.runtime_environ(os.environ, {"HF_TOKEN": token} if token else {})


def _merge_error(weights: RunWeights, base: str, stderr_text: str) -> LaunchError:
    last = REDACTOR.redact((stderr_text.strip() or "it ended without a message").splitlines()[-1])
    return PreflightError(
        f"{weights.label} cannot be merged into {base}", last, f"launch export {weights.label} --to DIR"
    )


def _adapter_config(weights: RunWeights) -> dict[str, Any]:
    return json.loads((weights.folder / _CONFIG).read_text())


def _is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether an adapter of ours is on the language model of a multimodal one."""
    return config.get("exclude_modules") == OTHER_MODULES


def _serve_line(weights: RunWeights, base: str, folder: Path, *, merged: bool, dtype: str) -> str:
    """The command with which vLLM alone answers as the run did.

    By default vLLM would round float32 weights, and sample with the top-p and penalties of the model's own
    files. It accepts only the ranks it has kernels for.
    """
    words = ["vllm", "serve", str(folder) if merged else base]
    words += ["--dtype", dtype, "--generation-config", "vllm"]
    config = _adapter_config(weights)
    if _is_multimodal(config):  # the language model is what the run served
        words += ["--language-model-only"]
    if not merged:
        rank = engine_rank(config["r"])
        words += ["--enable-lora", "--max-lora-rank", str(rank), "--lora-modules", f"policy={folder}"]
    return shlex.join(words)


def _card(weights: RunWeights, base: str, serve: str, *, merged: bool) -> str:
    """The README of the export: its content, and how to serve it."""
    what = "A model" if merged else "A LoRA adapter"
    whole = _ON_WHOLE_MODEL if not merged and _is_multimodal(_adapter_config(weights)) else ""
    run, step = weights.record.id, weights.step
    return f"""---
base_model: {base}
library_name: {"transformers" if merged else "peft"}
---
{what} trained by reinforcement learning with Slipway: run {run}, step {step}, on {base}.{whole}

```bash
{serve}
```
"""
