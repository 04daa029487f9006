"""The processes of a run, as torchrun starts them; one process without torchrun is a run too."""

import atexit
import ctypes
import os
import signal
import socket
import sys
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist


@dataclass(frozen=True)
class Workers:
    """This process among all."""

    rank: int
    """0-based; process 0 writes and talks."""
    world_size: int
    """Number of processes."""
    device: torch.device
    """Where this process trains."""

    @staticmethod
    def start(device: str) -> "Workers":
        """Join the processes (gloo on the CPU, nccl on GPUs).

        Args:
            device: "auto", "cpu" or "cuda".
        """
        if "TORCHELASTIC_RUN_ID" in os.environ:
            _die_with_parent()
        if "RANK" not in os.environ:
            alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
            os.environ.update(alone, MASTER_PORT=str(_free_port()))
        cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        here = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(here)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if cuda else "gloo")
            atexit.register(dist.destroy_process_group)  # not earlier: DeepSpeed keeps hold of the groups
        return Workers(dist.get_rank(), dist.get_world_size(), here)

    def total(self, values: Tensor) -> Tensor:
        """Sum over all processes, float64 on the CPU."""
        summed = values.to(self.device, torch.float64)
        dist.all_reduce(summed)
        return summed.cpu()

    @staticmethod
    def wait() -> None:
        """Return when all processes are here."""
        dist.barrier()


def _die_with_parent() -> None:
    """Let a SIGKILL of torchrun end its workers too (Linux): orphans would go on writing to the run directory."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG in sys/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
