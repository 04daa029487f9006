"""Loading weights through transformers, with a check that the files fill the model."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

QUANTISED = ("weight_scale", "weight_scale_inv", "weight_scale_2", ".qweight", ".weight_packed")
"""Ends of names of tensors without which quantised weights mean something else."""


def load_plain(path: str, dtype: torch.dtype, options: Mapping[str, Any]) -> PreTrainedModel:
    """The model of a directory or a Hub id.

    Args:
        path: What transformers loads.
        dtype: Dtype of the weights.
        options: More arguments of ``from_pretrained``.

    Raises:
        ValueError: The files lack weights, which would be random, have them in other shapes, or scale them in a way
            that is not read.
    """
    # Otherwise transformers raises an error that refers to a report in its log.
    options = {"ignore_mismatched_sizes": True} | dict(options)
    model, found = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True, **options)
    if odd := sorted(found["mismatched_keys"]):
        name, stored, expected = odd[0]
        shapes = f"{name} is {list(stored)}, and {list(expected)} by the config"
        raise ValueError(f"{len(odd)} of its tensors do not have the shapes of its config.json: {shapes}")
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"its files lack {len(missing)} of the model's tensors, among them {missing[0]}")
    if scales := sorted(name for name in found["unexpected_keys"] if name.endswith(QUANTISED)):
        raise ValueError(f"its weights are quantised in a way that is not read here ({scales[0]} is left over)")
    whole: PreTrainedModel = model
    return whole
