"""Heads to store, and what is stored of them."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from medusa.formats import find_format
from medusa.train.fresh_heads import last_norm


def trained(heads, base):
    """Fresh heads as if they had been trained: other weights, and no longer the first tokens to draft."""
    heads.init_from_base(base.lm_head_weight, last_norm(base))
    for parameter in heads.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    if heads.draft_ids is not None:
        heads.draft_ids.mul_(2).add_(3)
    return heads.eval().requires_grad_(False)


def stored(directory):
    """Tensors and config of a draft."""
    return load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())


def load_config(directory):
    return find_format(directory).read_config(Path(directory))


def change_config(directory, **values):
    """Write other values into the config of heads."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
