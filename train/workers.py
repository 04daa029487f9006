"""The processes of a run, as torchrun starts them; a run may also be one process without torchrun."""

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from medusa.train.config import Recipe
from medusa.train.recipe_file import RecipeError, flatten
from medusa.train.stop import StopRequest

Value = TypeVar("Value")

TIMEOUT = timedelta(minutes=30)
"""Longest wait for another process, which may prepare data while the others wait."""

PLACES = {"run", "base.name", "data.train", "data.heldout", "data.cache", "cache.directory"}
"""Recipe keys that may differ between machines."""


class LostProcessError(ConnectionError):
    """Another process of the run is gone."""


@dataclass(frozen=True)
class Workers:
    """This process among all."""

    rank: int
    """0-based; process 0 writes files and logs."""
    world_size: int
    """Number of processes."""
    device: torch.device
    """The device of this process."""
    stop: StopRequest = field(default_factory=StopRequest)
    """Whether the run was asked to end; each `total` makes the processes agree on it."""

    @staticmethod
    def start(device: str, stop: StopRequest) -> "Workers":
        """Join the processes (gloo on the CPU, nccl on GPUs).

        Args:
            device: "auto", "cpu" or "cuda".
            stop: signals that this process takes.

        Raises:
            ValueError: there is no GPU for this process.
        """
        if "RANK" not in os.environ:
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        here = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        if cuda:
            if here.index >= (count := torch.cuda.device_count()):
                raise ValueError(
                    f"engine.device ({device}): process {here.index} of this machine has no GPU, there are {count};"
                    " start fewer processes (NPROC), or set it to cpu"
                )
            torch.cuda.set_device(here)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT, device_id=here if cuda else None)
            atexit.register(dist.destroy_process_group)  # not earlier: DeepSpeed keeps references to the groups
        return Workers(dist.get_rank(), dist.get_world_size(), here, stop)

    def total(self, values: Tensor) -> Tensor:
        """Sum over all processes, float64 on the CPU; requests to stop are sent with it."""
        asked = torch.tensor([float(self.stop.number > 0)])
        summed = torch.cat([part.to(self.device, torch.float64).flatten() for part in (values, asked)])
        dist.all_reduce(summed)
        summed = summed.cpu()
        self.stop.agreed |= bool(summed[-1])
        return summed[:-1].view(values.shape)

    def any(self, here: bool) -> bool:
        """Whether `here` is true in any process; all processes call it."""
        return bool(self.total(torch.tensor(float(here))))

    def from_first(self, make: Callable[[], Value]) -> Value:
        """Send the result of `make` on process 0 to all: only its machine needs the run directory."""
        made: list[Value | None] = [make() if self.rank == 0 else None]
        dist.broadcast_object_list(made, src=0)
        return made[0]  # type: ignore[return-value]

    @staticmethod
    def wait() -> None:
        """Return when all processes are here."""
        dist.barrier()


def check_same(recipe: Recipe, samples: str, workers: Workers) -> None:
    """Check that all processes have the same recipe and samples; all processes call it.

    Args:
        recipe: the recipe of this process.
        samples: fingerprint of its training rows.
        workers: this process among all.

    Raises:
        RecipeError: values differ from those of process 0; the message names them.
    """
    ours = {key: value for key, value in flatten(asdict(recipe)) if key not in PLACES}
    ours["data.train"] = f"fingerprint {samples}"
    theirs = workers.from_first(lambda: ours)
    odd = [f"{key} is {ours[key]} here, {theirs[key]} there" for key in ours if ours[key] != theirs[key]]
    if workers.any(bool(odd)):
        named = "; ".join(odd) or "see the log of its machine"
        raise RecipeError(
            f"processes have different recipes or samples (process {workers.rank} and process 0: {named}); give all "
            "machines the same ones"
        )


@contextmanager
def failures_named() -> Iterator[None]:
    """Turn the various errors of a broken connection, and those of full memory, into one class each.

    Raises:
        LostProcessError: another process ended while this one waited for it.
        MemoryError: this process's device has no memory left.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise MemoryError(
                "memory ran out; lower optim.micro_rows (the base's pass) or engine.loss_rows (the loss): the same "
                "command then continues from the last checkpoint"
            ) from error
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):  # gloo's errors have no class
            raise
        raise LostProcessError(
            "another process of the run ended or cannot be reached any more; see the log of its machine; the same "
            "command then continues from the last checkpoint"
        ) from error
