"""A frozen base divided among processes: ZeRO-3 keeps a share of every layer and gathers a layer when it computes.

Embeddings and output layer, which the heads and their loss use at any time, are whole on every process. All processes
make a pass together; `train.features.BasePass` lets them make equally many.
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
"""Parameters of up to this many times the hidden size (norms, biases) stay whole: gathering them costs more."""


def load_sharded(name: str, dtype: torch.dtype | None, device: torch.device) -> BaseModel:
    """Load a base whose layers are divided among all processes; all processes call it.

    Process 0 reads the files into its CPU memory and distributes the weights; no device ever holds all of them.

    Args:
        name: directory, GGUF file or Hub id.
        dtype: float32 or bfloat16; None = chosen for the machine.
        device: device of this process.

    Raises:
        ValueError: the base cannot be loaded.
    """
    deepspeed = import_deepspeed(device)
    try:
        config = AutoConfig.from_pretrained(gguf.expanded(smollm2.locate(name)))  # one process downloads it first
    except (OSError, ValueError) as error:
        raise ValueError(f"base ({name}) cannot be loaded: {error}; give another path, or a Hub id") from error
    dtype = dtype or choose_dtype(config.dtype, device)
    zero = HfDeepSpeedConfig(_config(dtype, config.get_text_config().hidden_size))  # loading is divided from here on
    try:
        base = BaseModel.load(name, dtype=dtype, device=device)
    finally:
        unset_hf_deepspeed_config()
    embeddings = base.model.get_input_embeddings()
    base.model.set_input_embeddings(None)  # DeepSpeed would release them after every use
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
