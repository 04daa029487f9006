"""torchrun with an honest end: ``python -m train.launch [torchrun flags] -m train --recipe FILE``.

torchrun answers a failed worker with a page about the processes and the exit status 1. Here the worker's own message
stays the last word, and its exit status is handed on (Ctrl-C included).
"""

import logging
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun's command line.

    Returns:
        0, the exit status of the first worker that failed (1 where a signal killed it), or 128 + the signal received.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return max(failure.exitcode, 1)
    except SignalException as signal:
        return 128 + int(signal.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
