"""What a CPU multiplies faster: AVX-512 without AMX may take twice as long in bfloat16 as in float32."""

import logging
from functools import cache, partial
from statistics import median

import torch
from torch.nn.functional import linear

from medusa.clock import alternate, seconds

LOGGER = logging.getLogger("train")

ROUNDS = 5
ROWS, WIDTH, COLUMNS = 512, 512, 2048
"""Of the product that is timed: a billion multiplications, some ten milliseconds on one core."""


@cache
def slow_in_bfloat16(device: torch.device) -> bool:
    """Whether matrix products in float32 are faster here; never on a GPU."""
    if device.type != "cpu":
        return False
    products = {}
    for dtype in (torch.float32, torch.bfloat16):
        rows, weight = torch.ones(ROWS, WIDTH, dtype=dtype), torch.ones(COLUMNS, WIDTH, dtype=dtype)
        products[dtype] = partial(seconds, partial(linear, rows, weight), device)
    times = {dtype: median(measured) for dtype, measured in alternate(products, ROUNDS).items()}
    slow = times[torch.float32] < times[torch.bfloat16]
    if slow:
        ratio = times[torch.bfloat16] / times[torch.float32]
        LOGGER.info("base is loaded in float32: bfloat16 takes %.1f times as long on this CPU (base.dtype)", ratio)
    return slow
