"""Loads heads and the base that they were trained on, and tests which drafts the base can verify."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from medusa.base.model import BaseModel
from medusa.base.names import is_at, resolve_base, shipped_heads
from medusa.formats import load_heads, load_provenance
from medusa.heads import DraftHeads, HeadsConfig
from medusa.io.hub import are_heads, fetch_heads, is_model, is_repository
from medusa.loading import exactness
from medusa.loading.dtype import faster_dtype
from medusa.loading.self_test import choose_decoding, fuse
from medusa.loading.tensor_parallel import lead_or_follow
from medusa.torch_defaults import torch_defaults

logger = logging.getLogger(__name__)


@torch_defaults()
def load_base_and_heads(
    heads: str | Path | None,
    base: str | Path | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    **how: Any,
) -> tuple[BaseModel, DraftHeads | None, Mapping[str, Any] | None]:
    """Load the base, its heads and their provenance; see ``MedusaModel.from_pretrained``.

    ``how`` is passed on to ``BaseModel.load``.
    """
    directory, base = _told_apart(heads, base, revision)
    alone = heads is not None and directory is None
    loaded = None if directory is None else load_heads(directory, dtype=None)
    if loaded is not None:
        loaded.check_finite(str(heads))
    config = HeadsConfig(hidden_size=1, vocab_size=0) if loaded is None else loaded.config  # no heads ask for nothing
    if base is None and not config.base:
        raise ValueError("the heads' config names no base and none is given; give one: a directory or a Hub id")
    name = resolve_base(config.base, directory) if base is None else resolve_base(str(base))

    def load(dtype: torch.dtype | None) -> BaseModel:
        loaded_base = BaseModel.load(name, dtype, pack=True, adapter=config.base_adapter, **how)
        return fuse(choose_decoding(loaded_base).tapped(config.layers_of(loaded_base.num_layers)))

    base_model = load(dtype)
    if dtype is None and (faster := faster_dtype(base_model)) != base_model.dtype:
        del base_model  # free its memory before the next one is loaded
        base_model = load(faster)
    base_model = lead_or_follow(exactness.find_out(base_model))
    if config.base_source and config.base_source != base_model.source:
        logger.warning(
            "heads were trained on %s, and this base has %s: drafts may be right less often; the text is right",
            config.base_source, base_model.source or "other ones",
        )  # fmt: skip
    if alone:
        logger.warning("%s is a model without heads: it is loaded alone", heads)
    if directory is None or loaded is None:
        return base_model, None, None
    theirs = loaded.with_config(base=_from_here(config.base, directory)).config
    theirs.check_fit(base_model.hidden_size, base_model.vocab_size, base_model.name)
    return base_model, loaded.with_config(base=base_model.name), load_provenance(directory)


def _from_here(base: str, directory: Path) -> str:
    """The name of the heads' base as a user can give it: a path that is relative to the heads is resolved."""
    return str((directory / base).resolve()) if base and is_at(directory / base) else base


def _told_apart(
    heads: str | Path | None, base: str | Path | None, revision: str | None
) -> tuple[Path | None, str | Path | None]:
    """The directory of the heads (None = none) and the name of the base (None = the one that they name)."""
    if heads is None and base is None:
        raise ValueError("neither heads nor a base is named; give one: a directory, a Hub id, smollm2 or embedded")
    if base is not None and are_heads(base):
        raise ValueError(f"base ({base}) is a directory of heads; give it as heads, and a base only if it moved")
    if heads is None:
        return None, base
    if not Path(heads).is_dir() and (shipped := shipped_heads(str(heads))):
        logger.info("heads for %s: those of this package (%s)", heads, shipped)
        return Path(shipped), base
    if not is_model(heads, revision):
        return fetch_heads(heads, revision), base
    if base is not None:
        raise ValueError(f"heads ({heads}) are a whole model, and a base is named too ({base}); leave one out")
    return None, heads


@torch_defaults()
def load_draft_model(name: str | Path, base: BaseModel) -> BaseModel:
    """A smaller model in the base's dtype and on its device, prepared for decoding.

    Raises:
        FileNotFoundError: A directory is missing.
        ValueError: The model cannot be loaded or decoded, or the directory holds heads.
    """
    if are_heads(name) or (is_repository(str(name)) and not is_model(name)):
        raise ValueError(f"draft model ({name}) is no model: these are heads; give them as heads (heads=, --heads)")
    return fuse(choose_decoding(BaseModel.load(resolve_base(str(name)), base.dtype, base.device, pack=True)))
