"""The frozen base of a recipe: in a dtype, in 4 bits (QLoRA, Dettmers et al. 2023), or divided among processes."""

import logging
from functools import cache, partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch.nn.functional import linear
from transformers import BitsAndBytesConfig

from medusa.base.model import BaseModel
from medusa.base.names import full_name
from medusa.clock import alternate, seconds
from medusa.train.config import BaseRecipe
from medusa.train.workers import Workers

LOGGER = logging.getLogger("medusa.train")

ROUNDS = 5
ROWS, WIDTH, COLUMNS = 512, 512, 2048
"""Sizes of the timed product: about half a billion multiplications, some ten milliseconds on one core."""


def load_base(recipe: BaseRecipe, workers: Workers) -> BaseModel:
    """Load the base, whole or divided among the processes; all processes call it.

    Raises:
        ValueError: the base cannot be loaded, or 4 bits are not supported here.
    """
    name, device = full_name(recipe.name), workers.device
    dtype = None if recipe.dtype == "auto" else getattr(torch, recipe.dtype)
    if dtype is None and workers.from_first(partial(slow_in_bfloat16, device)):
        dtype = torch.float32
    if not recipe.shard:
        return BaseModel.load(name, dtype=dtype, device=device, load_options=_load_options(recipe, device))
    from medusa.train.sharded_base import load_sharded

    LOGGER.info("held-out tokens per step are not measured: decoding with a base divided among processes could diverge")
    return load_sharded(name, dtype, device)


@cache
def slow_in_bfloat16(device: torch.device) -> bool:
    """Whether products in float32 are faster than in bfloat16, by measurement; never on a GPU.

    With AVX-512 and without AMX they may take half as long.
    """
    if device.type != "cpu":
        return False
    products = {}
    for dtype in (torch.float32, torch.bfloat16):
        rows, weight = torch.ones(ROWS, WIDTH, dtype=dtype), torch.ones(COLUMNS, WIDTH, dtype=dtype)
        products[dtype] = partial(seconds, partial(linear, rows, weight), device)
    times = {dtype: median(measured) for dtype, measured in alternate(products, ROUNDS).items()}
    ratio = times[torch.bfloat16] / times[torch.float32]
    if ratio > 1:
        LOGGER.info("base is loaded in float32: bfloat16 takes %.1f times as long on this CPU (base.dtype)", ratio)
    return ratio > 1


def _load_options(recipe: BaseRecipe, device: torch.device) -> dict[str, Any]:
    """Arguments of `BaseModel.load` for the recipe's quantisation: weights in 4-bit NormalFloat."""
    if recipe.quantise == "none":
        return {}
    if device.type != "cuda" or find_spec("bitsandbytes") is None:
        raise ValueError(
            f"base.quantise ({recipe.quantise}) needs a CUDA device (this is {device.type}) and the package "
            "bitsandbytes; install it there, or set base.quantise to none"
        )
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32 if recipe.dtype == "float32" else torch.bfloat16,
    )
    return {"quantization_config": config}
