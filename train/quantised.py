"""A base whose weights are rounded to 4 bits, so that a large one fits (QLoRA, Dettmers et al. 2023)."""

from importlib.util import find_spec
from typing import Any

import torch
from transformers import BitsAndBytesConfig

from train.config import BaseRecipe


def load_options(base: BaseRecipe, device: torch.device) -> dict[str, Any]:
    """Arguments of `BaseModel.load` for the recipe's quantisation: weights in 4-bit NormalFloat (QLoRA).

    Raises:
        ValueError: it cannot be done here.
    """
    if base.quantise == "none":
        return {}
    if device.type != "cuda" or find_spec("bitsandbytes") is None:
        raise ValueError(
            f"base.quantise ({base.quantise}) needs a CUDA device (this is {device.type}) and the package "
            "bitsandbytes; install it there, or set base.quantise to none"
        )
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32 if base.dtype == "float32" else torch.bfloat16,
    )
    return {"quantization_config": config}
