"""The heads inside DeepSpeed: the only module that imports it.

The base stays outside, so checkpoints are small and resume strictly.
"""

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from train.config import EngineRecipe, OptimRecipe


class Engine:
    """A ZeRO engine around one module.

    Args:
        module: the trained module; its forward pass returns a loss first.
        optim: learning rate, weight decay, clipping, rows per step and per pass.
        engine: ZeRO stage and precision.
        device: where the module lives; torch.distributed is initialised already.
    """

    def __init__(self, module: nn.Module, optim: OptimRecipe, engine: EngineRecipe, device: torch.device) -> None:
        deepspeed = _import_deepspeed(device)
        self._deepspeed = deepspeed
        self._module = module
        self._engine, *_ = deepspeed.initialize(
            model=module.to(device),
            model_parameters=[parameter for parameter in module.parameters() if parameter.requires_grad],
            config=_config(optim, engine),
        )

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Forward pass of the module."""
        outputs: tuple[Tensor, ...] = self._engine(*inputs)
        return outputs

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate the gradient of a loss that is already normalised over processes and micro-batches.

        Args:
            loss: [].
            last: whether this is the step's last micro-batch; the same on all processes.
        """
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over processes; the loss of a process is its share of a sum.
        self._engine.backward(loss * self._engine.dp_world_size, scale_wrt_gas=False)
        if not last:
            self._engine.step()  # counts the micro-batch

    def step(self, lr: float) -> None:
        """Change the parameters by the accumulated gradient, with this learning rate."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()

    @property
    def gradient_norm(self) -> float:
        """Norm of the last step's gradient before clipping."""
        norm = self._engine.get_global_grad_norm()
        return float(norm) if norm is not None else float("nan")

    def save(self, directory: Path, tag: str, state: dict[str, Any]) -> None:
        """Write parameters, optimizer and `state` to directory/tag; all processes call it."""
        self._engine.save_checkpoint(str(directory), tag=tag, client_state=state, save_latest=False)

    def load(self, directory: Path, tag: str) -> dict[str, Any]:
        """Read what `save` wrote; returns `state`."""
        path, state = self._engine.load_checkpoint(str(directory), tag=tag)
        if path is None:
            raise ValueError(f"checkpoint ({directory / tag}) is damaged; delete it and start again")
        return dict(state)

    def full_state(self) -> dict[str, Tensor]:
        """All parameters, whole and on the CPU in float32, on every process; all processes call it."""
        with self._deepspeed.zero.GatheredParameters(list(self._module.parameters())):
            return {
                name: value.detach().to("cpu", torch.float32, copy=True)
                for name, value in self._module.state_dict().items()
            }


def _import_deepspeed(device: torch.device) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # else it probes, and warns when it finds only a CPU
    # DeepSpeed calls collectives under names that torch 2.13 is about to rename.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    import deepspeed

    # Else the first start on a CPU compiles a shared-memory all-reduce into the home directory, for half a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.WARNING)
    return deepspeed


def _config(optim: OptimRecipe, engine: EngineRecipe) -> dict[str, Any]:
    return {
        # The trainer itself says where a step ends: steps have different numbers of micro-batches.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optim.clip_norm,
        "steps_per_print": 1_000_000_000,
        "optimizer": {
            "type": "AdamW",
            # torch's own AdamW: DeepSpeed's would be compiled on first use.
            "params": {"lr": optim.lr, "weight_decay": optim.weight_decay, "torch_adam": True},
        },
        "zero_optimization": {"stage": engine.zero_stage, "overlap_comm": False},
        # Master weights and communication stay in float32; only the products are in bfloat16.
        "torch_autocast": {
            "enabled": engine.precision == "bfloat16",
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        },
    }
