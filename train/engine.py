"""The trained module inside DeepSpeed: the only module that imports it.

The base stays outside, so checkpoints are small.
"""

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from medusa.train.config import EngineRecipe, OptimRecipe

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Tensors that AdamW keeps per parameter, in addition to its step count."""


class Engine:
    """A ZeRO engine around one module, for losses that are shares of a sum over the whole optimizer step.

    Args:
        module: the trained module; its forward pass returns a loss first.
        optim: learning rate, weight decay, clipping.
        engine: ZeRO stage and offload.
        device: device of the module; torch.distributed must be initialised.
        groups: groups of trained parameters with one learning rate each.
        autocast: compute the module's products in bfloat16; weights and their sums stay in float32.
    """

    def __init__(
        self,
        module: nn.Module,
        optim: OptimRecipe,
        engine: EngineRecipe,
        device: torch.device,
        groups: Sequence[Sequence[nn.Parameter]],
        autocast: bool = False,
    ) -> None:
        self._deepspeed = import_deepspeed(device)
        self._module = module.to(device)
        self._device = device
        self._parameters = {name: value for name, value in module.named_parameters() if value.requires_grad}
        assert all(value.dtype == torch.float32 for value in self._parameters.values()), "state() holds master weights"
        self._engine, *_ = self._deepspeed.initialize(
            model=module,
            model_parameters=[{"params": list(group)} for group in groups],
            config=_config(optim, engine, autocast),
        )
        self._stage = engine.zero_stage
        self._norm = torch.zeros(())

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Forward pass of the module."""
        outputs: tuple[Tensor, ...] = self._engine(*inputs)
        return outputs

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of this process's share of the step's loss.

        Args:
            loss: normalised over all processes and micro-batches, so the step's loss is the plain sum.
            last: the step's last micro-batch; all processes make the same number of them.
        """
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over processes.
        self._engine.backward(loss * self._engine.dp_world_size, scale_wrt_gas=False)

    def step(self, *rates: float) -> None:
        """Step the optimizer with the learning rate of each group, after the last backward."""
        for group, rate in zip(self._engine.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if self._stage == 0:  # here DeepSpeed does not report the norm
            self._norm = nn.utils.get_total_norm(
                [value.grad for value in self._parameters.values() if value.grad is not None]
            )
        self._engine.step()

    @property
    def gradient_norm(self) -> float:
        """Norm of the last step's gradient before clipping."""
        return float(self._norm if self._stage == 0 else self._engine.get_global_grad_norm())

    def full_state(self) -> dict[str, Tensor]:
        """The module's whole state on the CPU of every process, weights in float32; all processes call it."""
        with self._whole():
            return {
                name: value.detach().to("cpu", torch.float32 if value.is_floating_point() else None, copy=True)
                for name, value in self._module.state_dict().items()
            }

    def state(self) -> dict[str, Tensor]:
        """The state to resume from, the same for any number of processes and ZeRO stage; all processes call it.

        Returns:
            On process 0, on the CPU: "parameter/NAME", "exp_avg/NAME" and "exp_avg_sq/NAME" of every trained parameter,
            whole and in float32, and "steps", the int64 count of optimizer steps. Elsewhere {}.
        """
        self._ensure_moments()
        state: dict[str, Tensor] = {}
        with self._whole():
            for name, parameter in self._parameters.items():
                self._keep(state, f"parameter/{name}", parameter)
        for moment in MOMENTS:
            for name, parameter in self._parameters.items():
                self._keep(state, f"{moment}/{name}", self._moment(parameter, moment))
        self._keep(state, "steps", torch.tensor(self._steps))
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Resume from the result of `state`, with any number of processes and ZeRO stage; all processes call it.

        Args:
            state: read on process 0 only.

        Raises:
            ValueError: a parameter of the module is missing.
        """
        self._ensure_moments()
        with self._whole(writer=0):
            for name, parameter in self._parameters.items():
                parameter.data.copy_(self._spread(state, f"parameter/{name}", parameter))
        if self._stage > 0:
            self._engine.optimizer.refresh_fp32_params()
        for moment in MOMENTS:
            for name, parameter in self._parameters.items():
                like = self._moment(parameter, moment)
                self._set_moment(parameter, moment, self._spread(state, f"{moment}/{name}", like))
        self._steps = int(self._spread(state, "steps", torch.tensor(0, device=self._device)))

    def _keep(self, state: dict[str, Tensor], name: str, value: Tensor) -> None:
        if dist.get_rank() == 0:
            state[name] = value.detach().to("cpu", copy=True)

    def _spread(self, state: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
        """Send the tensor of this name from process 0 to all processes."""
        if dist.get_rank() == 0 and name not in state:
            raise ValueError(f"checkpoint has no {name}; it is damaged or of other heads: delete it and start again")
        value = state[name].to(self._device) if dist.get_rank() == 0 else torch.empty_like(like)
        dist.broadcast(value, src=0)
        return value

    @contextmanager
    def _whole(self, writer: int | None = None) -> Iterator[None]:
        """A context with whole parameters, also under ZeRO-3; changes by process `writer` reach all processes."""
        with self._deepspeed.zero.GatheredParameters(list(self._module.parameters()), modifier_rank=writer):
            yield

    def _ensure_moments(self) -> None:
        """Create AdamW's moments, which its first step creates, by a step with zero gradients and learning rate 0."""
        if not self._engine.basic_optimizer.state:
            with self._whole():
                nothing = torch.stack([parameter.sum() * 0.0 for parameter in self._parameters.values()]).sum()
                self.backward(nothing, last=True)
            self.step(*(0.0 for _ in self._engine.optimizer.param_groups))
            self._steps = 0
        if self._stage in (1, 2):  # DeepSpeed links parameters to their moments once the first group has some
            zero = self._engine.optimizer
            for group, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
                self._deepspeed.utils.lazy_init_hp_params_optimizer_state(group, flat, zero.optimizer.state)

    @property
    def _steps(self) -> int:
        return int(next(iter(self._engine.basic_optimizer.state.values()))["step"])

    @_steps.setter
    def _steps(self, steps: int) -> None:
        for state in self._engine.basic_optimizer.state.values():
            state["step"].fill_(steps)

    def _moment(self, parameter: nn.Parameter, moment: str) -> Tensor:
        value: Tensor
        if self._stage == 0:
            value = self._engine.basic_optimizer.state[parameter][moment]
        else:
            value = self._deepspeed.utils.safe_get_full_optimizer_state(parameter, moment)
        return value

    def _set_moment(self, parameter: nn.Parameter, moment: str, value: Tensor) -> None:
        if self._stage == 0:
            self._engine.basic_optimizer.state[parameter][moment].copy_(value)
        elif self._stage < 3:
            self._deepspeed.utils.safe_set_full_optimizer_state(parameter, value, moment)
        else:  # DeepSpeed's setter of whole tensors fails where the processes do not divide the parameter
            width = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
            padded = nn.functional.pad(value.flatten(), (0, width * dist.get_world_size() - value.numel()))
            part = padded[width * dist.get_rank() :][:width]
            self._deepspeed.utils.safe_set_local_optimizer_state(parameter, part, moment)


def import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed, quiet and without builds on first use; nothing else imports it."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # otherwise it probes devices, and warns of a CPU
    # DeepSpeed calls collectives under names that torch 2.13 is about to rename.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # The backward pass has a thread of its own, whose first product finds the device by itself.
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
    # Norms of heads read 16 bits and have weights of 32; torch has no kernel of its own for that, and says so.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    import deepspeed

    # Otherwise the first start on a CPU compiles a shared-memory all-reduce into the home directory for half a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.WARNING)
    return deepspeed


def _config(optim: OptimRecipe, engine: EngineRecipe, autocast: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": engine.zero_stage, "overlap_comm": False}
    if engine.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        # The trainer itself says where a step ends: steps have different numbers of micro-batches.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optim.clip_norm,
        "steps_per_print": 1_000_000_000,
        "optimizer": {
            "type": "AdamW",
            # torch's own AdamW, fused on every device: DeepSpeed's would be compiled on first use.
            "params": {"lr": optim.lr, "weight_decay": optim.weight_decay, "torch_adam": True, "fused": True},
        },
        "zero_optimization": zero,
        # Master weights and communication stay in float32; only the products are in bfloat16.
        "torch_autocast": {"enabled": autocast, "dtype": "bfloat16", "lower_precision_safe_modules": []},
    }
