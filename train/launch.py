"""torchrun with an honest end: ``python -m medusa.train.launch [torchrun flags] -m medusa.train --recipe FILE``.

torchrun answers a failed worker with a page about the processes and the exit status 1. Here the worker's own message
stays the last word, and its exit status is handed on (Ctrl-C included). What a killed worker cannot say is said here.
"""

import logging
import os
import sys
from collections.abc import Sequence

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import parse_args, run

LOGGER = logging.getLogger("medusa.train")
DEFAULTS = {
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",  # seconds for a checkpoint; torchrun's own 30 may be too few
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",  # handed on to the workers
    # Workers keep the pages of their tensors, as launch.sh says: on a small virtual machine several times as fast.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=4294967296"
    ":glibc.malloc.top_pad=67108864",
}
"""Environment of torchrun and its workers, where the user's says nothing else."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun's command line.

    Returns:
        0, the exit status of the first worker that failed (1 where a signal killed it), or 128 + the signal received.
    """
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):  # each has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        run(parse_args(arguments))
    except (ChildFailedError, SignalException, DistError, RendezvousError) as error:
        return exit_status(error)
    return 0


def exit_status(error: Exception) -> int:
    """The exit status for an error that ended torchrun; logs what no worker can say."""
    if isinstance(error, ChildFailedError):
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            LOGGER.error(
                "process %d was killed by %s (from outside, or because memory ran out); the same command continues "
                "from the last checkpoint",
                rank, failure.signal_name(),
            )  # fmt: skip
        return max(failure.exitcode, 1)
    if isinstance(error, SignalException):
        return 128 + int(error.sigval)
    LOGGER.error("processes cannot connect: %s; check MASTER_ADDR, MASTER_PORT and every machine's NODE_RANK", error)
    return 1


if __name__ == "__main__":
    sys.exit(main())
