"""``medusa train``: checks a recipe, then starts the processes that train with it."""

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence

from medusa.train.__main__ import main as work
from medusa.train.recipe_file import RecipeError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 done, 1 failure, 2 wrong use, 128 + the signal that ended it.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help", "--check"} & set(words) or "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun itself started this
        return work(words)
    if status := work(["--check", *words]):  # wrong use ends here with one message
        return status
    try:
        flags = torchrun_flags(os.environ)
    except RecipeError as error:
        logging.getLogger("medusa.train").error("%s", error)
        return 2
    from medusa.train.launch import main as launch

    return launch([*flags, "-m", "medusa.train", *words])


def processes(environment: Mapping[str, str]) -> int:
    """Number of training processes on this machine: NPROC, or one for each GPU, or one.

    Raises:
        RecipeError: NPROC is not a number of processes.
    """
    import torch

    named = environment.get("NPROC") or str(torch.cuda.device_count() or 1)
    if not named.isdecimal() or not int(named):
        raise RecipeError(f"NPROC ({named}) must be a number of processes, 1 or more; export another, or unset it")
    return int(named)


def torchrun_flags(environment: MutableMapping[str, str]) -> list[str]:
    """Flags for torchrun, from NPROC, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT.

    Sets ``OMP_NUM_THREADS`` to this machine's cores divided by its processes, unless it is set.

    Raises:
        RecipeError: NPROC is not a number of processes, or MASTER_ADDR is missing for several machines.
    """
    from medusa.clock import cores
    from medusa.files import cache_directory

    count = processes(environment)
    environment.setdefault("OMP_NUM_THREADS", str(max(cores() // count, 1)))
    machines = environment.get("NNODES") or "1"
    meeting = ["--standalone"]
    if machines != "1":
        if not (address := environment.get("MASTER_ADDR")):
            raise RecipeError(f"NNODES={machines} needs MASTER_ADDR, the machine with NODE_RANK=0; export both")
        meeting = ["--node_rank", environment.get("NODE_RANK") or "0", "--master_addr", address]
        meeting += ["--master_port", environment.get("MASTER_PORT") or "29500"]
    logs = ["--log_dir", str(cache_directory().parent / "torchrun")]
    return ["--nproc_per_node", str(count), "--nnodes", machines, *meeting, *logs]
