"""torchrun with the worker's own error message and exit status.

``python -m medusa.train.launch [torchrun flags] -m medusa.train --recipe FILE``.

If a worker fails, torchrun prints a page about the processes and returns exit status 1. Here the worker's own message
is the last one, and its exit status is returned (Ctrl-C included). For a killed worker this module prints a message.
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
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",  # forwarded to the workers
    # Workers keep the pages of their tensors, see launch.sh: several times as fast on a small virtual machine.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=4294967296"
    ":glibc.malloc.top_pad=67108864",
}
"""Environment of torchrun and its workers; values that the user has set take precedence."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun's command line.

    Returns:
        0, the exit status of the first failed worker (1 if a signal killed it), or 128 + the received signal.
    """
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):  # each has its own level
            logging.getLogger(name).setLevel(logging.CRITICAL)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        run(parse_args(arguments))
    except (ChildFailedError, SignalException, DistError, RendezvousError) as error:
        return exit_status(error)
    return 0


def exit_status(error: Exception) -> int:
    """The exit status for an error that ended torchrun; logs errors that no worker can report."""
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
