"""A frozen base that no device holds whole: ZeRO-3 keeps a share of every layer and gathers a layer when it computes.

Embeddings and output layer, which the heads and their loss use at any time, are whole on every process. A pass is a
common act of all processes; `train.features.BasePass` makes them do equally many.
"""

from typing import Any

import torch
from transformers import AutoConfig
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from medusa.base import gguf, smollm2
from medusa.base.checkpoint import choose_dtype
from medusa.base.model import BaseModel
from medusa.train.engine import import_deepspeed

WHOLE_ROWS = 16
"""Parameters of up to so many times the hidden size (norms, biases) stay whole: it costs more to gather them."""


def load_sharded(name: str, dtype: torch.dtype | None, device: torch.device) -> BaseModel:
    """Load a base whose layers are divided among all processes; all of them call it.

    Process 0 reads the files into its CPU memory and deals the weights out; no device ever holds them all.

    Args:
        name: directory, GGUF file or Hub id.
        dtype: float32 or bfloat16; None = what suits the machine.
        device: where this process computes.

    Raises:
        ValueError: the base cannot be loaded.
    """
    deepspeed = import_deepspeed(device)
    try:
        config = AutoConfig.from_pretrained(gguf.expanded(smollm2.locate(name)))  # by one process, before all load it
    except (OSError, ValueError) as error:
        raise ValueError(f"base ({name}) cannot be loaded: {error}; give another path, or a Hub id") from error
    dtype = dtype or choose_dtype(config.dtype, device)
    zero = HfDeepSpeedConfig(_config(dtype, config.get_text_config().hidden_size))  # from here on loading is in parts
    try:
        base = BaseModel.load(name, dtype=dtype, device=device)
    finally:
        unset_hf_deepspeed_config()
    embeddings = base.model.get_input_embeddings()
    base.model.set_input_embeddings(None)  # DeepSpeed would let go of them after every use
    deepspeed.initialize(model=base.decoder, config=zero.config)
    base.model.set_input_embeddings(embeddings)
    for module in (embeddings, base.model.get_output_embeddings()):
        for parameter in module.parameters():
            parameter.all_gather()
    return base


def _config(dtype: torch.dtype, hidden_size: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 1_000_000_000,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": WHOLE_ROWS * hidden_size,
            "memory_efficient_linear": False,
        },
    }
