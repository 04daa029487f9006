"""Torch's own defaults, whatever the program around this package has set for its own work."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def torch_defaults() -> Iterator[None]:
    """A context, or a decorator, in which tensors are on the CPU where no device is named, and nothing is autocast.

    A program may call ``torch.set_default_device("cuda")``, and our kernels read host tensors by their addresses.
    """
    cast = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    if not cast and torch.get_default_device().type == "cpu":
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(torch.device("cpu"))
        for device in cast:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
