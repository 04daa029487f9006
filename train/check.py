"""Mistakes of a recipe that can be found before anything is loaded: missing files, sizes that do not fit.

Like ``train.recipe_file`` this module does not import torch, so that a wrong recipe is reported at once.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from medusa.base import gguf_names, smollm2
from medusa.base.merged import plain_base
from medusa.base.names import HUB_ID, full_name, is_path
from medusa.base.on_hub import kept_directory
from medusa.data.files import sample_files
from medusa.data.hub import means_files
from medusa.files import peek_object
from medusa.train.config import Recipe
from medusa.train.run_directory import RunDirectory

CONTEXT = "max_position_embeddings", "n_positions", "max_seq_len"
LAYERS = "num_hidden_layers", "n_layer"
"""Keys for the context length in the configs of different families."""


def mistakes(recipe: Recipe) -> Iterator[str]:
    """All mistakes, one sentence each."""
    base = ""
    try:
        base = _directory(recipe.base.name)
    except (OSError, ValueError) as error:
        yield f"base.name: {error}"
    yield from _too_large(recipe, base)
    if is_path(recipe.heads.init_from) and not Path(recipe.heads.init_from).is_dir():
        yield f"heads.init_from ({recipe.heads.init_from}) does not exist; give a directory of heads, or a Hub id"
    if recipe.heads.init_share and not recipe.heads.init_from:
        share = recipe.heads.init_share
        yield f"heads.init_share ({share}) is of the heads of heads.init_from, which is empty; give both, or neither"
    first = os.environ.get("NODE_RANK", "0") == "0"  # only this machine reads held-out samples and the run directory
    options = recipe.evaluate
    if options.patience and not (options.every_steps and recipe.data.heldout):
        what = f"evaluate.patience ({options.patience}) needs evaluations"
        yield f"{what}; give evaluate.every_steps and data.heldout, or leave it out"
    if options.patience and recipe.lora.rank:
        yield (
            f"evaluate.patience ({options.patience}) keeps the best heads, and lora.rank ({recipe.lora.rank}) changes"
            " the base with them; give one of the two"
        )
    for key, name in (("train", recipe.data.train), ("heldout", recipe.data.heldout if first else "")):
        if name and means_files(name):
            try:
                sample_files(Path(name))
            except FileNotFoundError as error:
                yield f"data.{key}: {error}"
    places = {"run": recipe.run if first else "", "data.cache": recipe.data.cache}
    if recipe.cache.mode != "online":
        places["cache.directory"] = recipe.cache.directory
    for key, name in places.items():
        if name and (obstacle := _obstacle(Path(name))):
            yield f"{key} ({name}) cannot be written: {obstacle}; give another directory"
    if first:
        try:
            RunDirectory(recipe.run).finished(recipe)
        except ValueError as error:
            yield str(error)


def _obstacle(directory: Path) -> str:
    """Why a directory can be neither made nor written to; "" = it can be, as far as is known."""
    there = next(place for place in (directory, *directory.absolute().parents) if place.exists())
    if not there.is_dir():
        return f"{there} is a file"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} is not writable"


def _directory(name: str) -> str:
    """The directory of the base's config; "" = not on this machine yet.

    Raises:
        OSError: There is no such base.
        ValueError: The name fits several bases.
    """
    name = plain_base(name)  # adapters are merged when training begins
    if full_name(name) == HUB_ID:
        return smollm2.kept()
    is_file = gguf_names.find(name) if Path(name).exists() else "gguf" in name.lower()
    if is_file:  # it is loaded or downloaded when training begins
        return ""
    found = smollm2.locate(name)
    return found if Path(found).is_dir() else kept_directory(found)


def _too_large(recipe: Recipe, directory: str) -> Iterator[str]:
    """Values of the recipe that exceed those of the base, as far as its config has them."""
    config = (peek_object(Path(directory) / "config.json") if directory else None) or {}
    config = config.get("text_config", config)
    heads, base = recipe.heads, recipe.base.name
    for key, value, names, spare, what in (
        ("data.row_tokens", recipe.data.row_tokens, CONTEXT, 0, "the context of the base"),
        ("heads.draft_vocab", heads.draft_vocab, ("vocab_size",), 0, "the vocabulary of the base"),
        ("heads.mask_token", heads.mask_token, ("vocab_size",), 1, "the last token of the base"),
        ("heads.feature_layers", heads.feature_layers, LAYERS, 1, "the layers below the last one of the base"),
    ):
        found = next((config[name] for name in names if isinstance(config.get(name), int)), None)
        if found is not None and value > found - spare:
            yield f"{key} ({value}) is more than {what} ({found - spare}, {base}); lower it"
