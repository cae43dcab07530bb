"""Our additions inside vLLM: a fast LoRA path and quiet idling on CPU, and the check of the loaded adapter.

Neighbours: command.py names `Executor` and `WorkerExtension` to vLLM, which builds them in its engine core;
engine_client.py reaches `WorkerExtension`'s methods through /collective_rpc; adapter_check.py does the
comparing. Knows nothing of versions or checkpoints.
"""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroupGloo, Store, distributed_c10d
from vllm.logger import init_logger
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from runtime.engine import norms as norms  # registered by being imported
from runtime.engine import one_token_prefills
from runtime.engine.adapter_check import WEIGHTS, Pair, compare
from runtime.shared import failpoints

if TYPE_CHECKING:
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.request import LoRARequest

# Below vLLM's own name, so that it is written where and as vLLM's lines are.
log = init_logger("vllm.slipway")
# Adapter name → the number vLLM's worker knows it by.
_numbers: dict[str, int] = {}
# Adapter name → hash of the weights it stands for, as long as this process lives: the prefix cache knows
# them by name and place (C33).
_weights: dict[str, str] = {}


class Executor(UniProcExecutor):
    """vLLM's own, which puts our parts in place before it builds its worker.

    It is built in the engine core. Parts that only the API's process has installed are there when the core
    was forked from it, and missing when it was spawned, as vLLM does once CUDA is initialised.
    """

    def _init_executor(self) -> None:
        if (server := multiprocessing.parent_process()) and server.pid != os.getppid():
            raise ChildProcessError("the server died before this core could ask to die with it")
        install()
        super()._init_executor()
        log.info("model runner: %s", _model_runner(self.driver_worker.worker))


def install() -> None:
    """Put our parts in place, in this process, before vLLM builds its worker. Again changes nothing."""
    LRUCacheWorkerLoRAManager._load_adapter = _load_and_remember
    if current_platform.is_cpu():
        type(current_platform).get_punica_wrapper = classmethod(lambda _: f"{__name__}.DenseLora")
        distributed_c10d.ProcessGroupGloo = SingleDeviceGloo
        FusedMoEConfig.__post_init__ = _disable_lora_of_experts
        one_token_prefills.install()


_load_adapter = LRUCacheWorkerLoRAManager._load_adapter
_complete = FusedMoEConfig.__post_init__


def _disable_lora_of_experts(self: FusedMoEConfig) -> None:
    """Experts have no LoRA here. vLLM takes its Triton kernels for them wherever anything has, on a CPU too,
    and dies of the first request.
    """
    self.is_lora_enabled = False
    _complete(self)


def _load_and_remember(self: LRUCacheWorkerLoRAManager, lora_request: LoRARequest) -> LoRAModel:
    """vLLM's own loading, with the data that we need later."""
    name = lora_request.lora_name
    sha256 = hashlib.sha256((Path(lora_request.lora_path) / WEIGHTS).read_bytes()).hexdigest()
    if _weights.setdefault(name, sha256) != sha256:
        raise ValueError(f"{name} had other weights before: a name is never used again")
    loaded = _load_adapter(self, lora_request)
    _numbers[name] = lora_request.lora_int_id
    failpoints.failpoint("engine.loading")
    return loaded


def _model_runner(worker: Any) -> str:
    """The full name of the class that runs the model: vLLM has an older and a newer one."""
    kind = type(worker.model_runner)
    return f"{kind.__module__}.{kind.__qualname__}"


@functools.cache
def _gloo_device() -> ProcessGroupGloo.Device:
    return ProcessGroupGloo.create_device(interface=os.environ["GLOO_SOCKET_IFNAME"])


class SingleDeviceGloo(ProcessGroupGloo):
    """Gloo with one device for the whole process.

    A device is a thread that wakes 100 times a second. vLLM makes 13 groups, also for a worker that is alone,
    and torch a device for each: 2 % of a core in an engine that has nothing to do.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        options = ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [_gloo_device()]
        super().__init__(store, rank, size, options)


class WorkerExtension:
    """Mixed into vLLM's worker. Arguments and answers are JSON."""

    model_runner: Any

    def sampling(self) -> dict[str, Any]:
        """This worker's logprobs mode and model runner."""
        mode = self.model_runner.sampler.logprobs_mode
        return {"logprobs_mode": mode, "model_runner": _model_runner(self)}

    def verify_adapter(self, name: str, folder: str) -> dict[str, Any]:
        """Compare the tensors that this worker multiplies with for `name` with the PEFT folder
        (adapter_check.py)."""
        failpoints.failpoint("engine.verifying")
        manager = self.model_runner.lora_manager._adapter_manager
        number = _numbers.get(name)
        if number not in manager.list_adapters():
            return {"modules": 0, "expected": 0, "mismatched": [f"{name} is not loaded"], "sha256": ""}
        manager.activate_adapter(number)
        slot = manager.lora_index_to_id.index(number)
        held = {
            module: [
                Pair(a[slot, 0], b[slot, 0])
                for a, b in zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
            ]
            for module, layer in manager.modules.items()
            if isinstance(layer, BaseLinearLayerWithLoRA)
        }
        return compare(held, Path(folder), _engine_names(self.model_runner.model))


def _engine_names(model: Any) -> Callable[[str], str]:
    """How this model renames the weights of its files, and so those of an adapter."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return lambda name: name
    renames = mapper.get_rename_mapper()
    return lambda name: renames.apply_list([name])[0]


class DenseLora(PunicaWrapperCPU):
    """LoRA on CPU as two matrix products per adapter in the batch.

    vLLM's own path gathers A and B once per token, which makes a LoRA request cost four base requests. It
    also gives a token without adapter the matrices of the last slot, by indexing with -1, when the batch
    holds tokens with one: here such tokens are left alone.
    """

    # Slot of each adapter in the batch, with its rows; None: all of them.
    _groups: list[tuple[int, torch.Tensor | None]]

    def update_metadata(
        self,
        mapping: LoRAMapping,
        lora_index_to_id: list[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        """Called once per batch: which rows belong to which slot."""
        super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        slots = self.token_lora_indices
        present = slots.unique().tolist()
        if len(present) == 1:
            self._groups = [(present[0], None)]
        else:
            self._groups = [(slot, (slots == slot).nonzero().squeeze(1)) for slot in present]
        self._groups = [group for group in self._groups if group[0] >= 0]

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        """y[tokens, out] += x[tokens, in] A^T B^T * scale in place, slice by slice of the fused output."""
        for slot, rows in self._groups:
            inputs = x if rows is None else x[rows]
            start = 0
            for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                low = inputs @ a[slot, 0].to(x.dtype).T
                part = y[:, start : start + size]
                matrix = b[slot, 0].to(y.dtype).T
                if rows is None:
                    part.addmm_(low.to(y.dtype), matrix, alpha=scale)
                else:
                    part.index_add_(0, rows, low.to(y.dtype) @ matrix, alpha=scale)
                start += size
