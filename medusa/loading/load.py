"""Load heads and the base that they were trained on, and find out what that base can verify."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from medusa.base.checkpoint import resolve_base
from medusa.base.model import BaseModel
from medusa.formats import load_heads, load_provenance
from medusa.heads import DraftHeads, HeadsConfig
from medusa.io.hub import fetch_heads
from medusa.loading import exactness
from medusa.loading.dtype import faster_dtype
from medusa.loading.self_test import choose_decoding, fuse
from medusa.loading.tensor_parallel import lead_or_follow

logger = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """What ``MedusaModel`` is made of."""

    base: BaseModel
    heads: DraftHeads | None = None
    provenance: Mapping[str, Any] | None = None


def load_base_and_heads(
    heads: str | Path | None,
    base: str | Path | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    attention: str = "auto",
    int8: bool = False,
    load_options: Mapping[str, Any] | None = None,
    revision: str | None = None,
) -> Loaded:
    """What ``MedusaModel.from_pretrained`` loads, see there."""
    heads = fetch_heads(heads, revision) if heads is not None else None
    loaded = load_heads(heads, dtype=None) if heads is not None else None
    config = loaded.config if loaded is not None else None
    if base is None and (config is None or not config.base):
        raise ValueError("the heads' config names no base and none is given; give one: a directory or a Hub id")
    name = resolve_base(str(base)) if base is not None else resolve_base(config.base, heads)  # type: ignore[union-attr]

    def load(dtype: torch.dtype | None) -> BaseModel:
        loaded_base = BaseModel.load(
            name, dtype, device, pack=True, int8=int8, attention=attention, load_options=load_options,
            adapter=config.base_adapter if config is not None else "",
        )  # fmt: skip
        return fuse(choose_decoding(loaded_base).tapped(config.feature_layers if config is not None else ()))

    base_model = load(dtype)
    if dtype is None and (faster := faster_dtype(base_model)) != base_model.dtype:
        del base_model  # its memory goes before the other comes
        base_model = load(faster)
    base_model = lead_or_follow(exactness.find_out(base_model))
    if config is not None:
        _warn_of_other_weights(config, base_model)
    if heads is None or loaded is None:
        return Loaded(base_model)
    loaded = loaded.with_config(base=base_model.name)
    return Loaded(base_model, loaded, load_provenance(heads))


def _warn_of_other_weights(config: HeadsConfig, base: BaseModel) -> None:
    if config.base_source and config.base_source != base.source:
        logger.warning(
            "heads were trained on %s of the base, and this one has %s: drafts may be right less often, the text stays"
            " the base's own",
            config.base_source, base.source or "other ones",
        )  # fmt: skip
