"""Initial heads, and their draft vocabulary: the most frequent tokens of the training data.

Shapes: V vocabulary, D hidden size.
"""

import logging

import torch
from torch import Tensor

from medusa.base.model import BaseModel
from medusa.base.names import full_name
from medusa.base.taps import outer_layers, spread_layers
from medusa.data.packing import PackedRows
from medusa.formats import load_heads
from medusa.heads import DraftHeads, HeadsConfig, build_heads
from medusa.heads.layer import LayerConfig
from medusa.io.hub import fetch_heads
from medusa.train.config import REMEMBERING, HeadsRecipe, Recipe
from medusa.train.recipe_file import RecipeError
from medusa.train.workers import Workers

LOGGER = logging.getLogger("medusa.train")
ROWS_AT_A_TIME = 1024
"""Rows in memory while tokens are counted."""
SHAPE = (
    "architecture", "hidden_size", "num_layers", "own_lm_heads", "feature_layers", "layer", "mask_token",
    "own_correction", "skip_root", "layer_windows",
)  # fmt: skip
"""Fields that must be equal for heads to start from the weights of others, in addition to the sizes of tensors."""


def feature_layers(shape: HeadsRecipe, num_layers: int) -> tuple[int, ...]:
    """The layers, counted from 1, whose outputs heads read in addition to the last hidden state, or instead of it.

    Raises:
        ValueError: The base has fewer layers.
    """
    remembering = shape.architecture in REMEMBERING
    if remembering and not shape.last_layer:
        return outer_layers(shape.feature_layers, num_layers)
    return spread_layers(shape.feature_layers, num_layers) + (num_layers,) * remembering


def fresh_heads(recipe: Recipe, base: BaseModel, packed: PackedRows, workers: Workers) -> DraftHeads:
    """Heads of the recipe's shape; the seed decides their weights.

    Args:
        recipe: the recipe.
        base: the base, with the layers tapped that heads read.
        packed: training rows.
        workers: this process among all, which call it together.
    """
    torch.manual_seed(recipe.optim.seed)
    shape = recipe.heads
    layer: LayerConfig | None = None
    masked = shape.architecture == "block" and shape.mask_token >= 0
    if shape.architecture in REMEMBERING:
        norms = {"norm_features": shape.norm_features and not masked, "norm_heads": masked}
        layer = LayerConfig.of(base.config, norm_output=shape.norm_output, window=shape.window or None, **norms)
    heads = build_heads(
        HeadsConfig(
            hidden_size=base.hidden_size,
            vocab_size=base.vocab_size,
            num_heads=shape.num_heads,
            num_layers=shape.num_layers,
            own_lm_heads=shape.own_lm_heads,
            base=full_name(recipe.base.name),
            base_source=base.source,
            architecture=shape.architecture,
            feature_layers=base.feature_layers,
            rank=shape.rank,
            draft_vocab_size=shape.draft_vocab,
            layer=layer,
            mask_token=shape.mask_token if masked else None,
        )
    )
    others = load_heads(fetch_heads(shape.init_from)) if shape.init_from else None
    if heads.draft_ids is not None:
        known = None if others is None else others.draft_ids
        heads.draft_ids.copy_(most_frequent_tokens(packed, shape.draft_vocab, base.vocab_size, workers, known))
    heads.init_from_base(base.lm_head_weight, last_norm(base))
    if others is not None:
        start_from(heads, others, shape.init_from)
    return heads


def last_norm(base: BaseModel) -> Tensor:
    """[D] the weight of the norm before the base's output layer; ones if it is not found."""
    signs_D = torch.ones(base.hidden_size, dtype=base.dtype, device=base.device)
    signs_D[::2] = -1.0  # both LayerNorm and RMSNorm leave these unchanged
    for module in reversed(list(base.decoder.children())):
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.shape == signs_D.shape:
            with torch.no_grad():
                normed_2D: Tensor = module(torch.stack([signs_D, torch.zeros_like(signs_D)]).to(weight.device))
            return (normed_2D[0] - normed_2D[1]).to(base.device) * signs_D  # of zeros only the bias is left
    return signs_D.abs()


def start_from(heads: DraftHeads, others: DraftHeads, name: str) -> None:
    """Copy the weights of other, trained heads.

    Args:
        heads: changed in place.
        others: heads of the same shape; their draft vocabulary matters only if they own a vocabulary matrix.
        name: name of the others, for errors.

    Raises:
        RecipeError: the others have another shape.
        ValueError: they hold numbers that are not finite.
    """
    own = heads.config.own_lm_heads
    for key in (*SHAPE, *(["draft_vocab_size"] if own else [])):
        ours, theirs = getattr(heads.config, key), getattr(others.config, key)
        if ours != theirs:
            raise RecipeError(
                f"heads.init_from ({name}) has {key} {theirs}, and the recipe {ours}; give the recipe the same, or "
                "leave init_from out"
            )
    state = others.state_dict()
    if not own:
        state.pop("draft_ids", None)
        state |= {} if heads.draft_ids is None else {"draft_ids": heads.draft_ids}
    sizes = {key: (tuple(state[key].shape), tuple(ours.shape)) for key, ours in heads.state_dict().items()}
    for key, (theirs, ours) in sizes.items():
        if ours != theirs:
            raise RecipeError(
                f"heads.init_from ({name}) has {key} of {theirs}, and the recipe's heads of {ours}; give the recipe "
                "the same sizes, or leave init_from out"
            )
    others.check_finite(name)
    heads.load_state_dict(state)


def most_frequent_tokens(
    packed: PackedRows, size: int, vocab_size: int, workers: Workers, known: Tensor | None = None
) -> Tensor:
    """The most frequent tokens of answers, or of prompts if nothing is answered.

    Of equally frequent ones, and of those that are not there, known ones come first, and then lower ids.

    The result is the same for any number of processes; each counts its share of the rows, and all call it.

    Args:
        packed: training rows.
        size: number of tokens.
        vocab_size: V.
        workers: this process among all.
        known: int64 [any] ids that the heads which training starts from can draft.

    Returns:
        int64 [size] token ids, ascending.
    """

    def counted(answers: bool) -> Tensor:
        counts_V = torch.zeros(vocab_size, dtype=torch.int64)
        for rows in torch.arange(workers.rank, len(packed), workers.world_size).split(ROWS_AT_A_TIME):
            wanted = packed.loss_mask[rows] if answers else packed.supervised(rows)
            counts_V += torch.bincount(packed.input_ids[rows][wanted].long(), minlength=vocab_size)
        return workers.total(counts_V)

    counts_V = counted(answers=True)
    if not counts_V.any():
        counts_V = counted(answers=False)
    ranks_V = 2 * counts_V
    if known is not None:
        ranks_V[known[known < vocab_size]] += 1
    chosen = ranks_V.argsort(descending=True, stable=True)[:size].sort().values
    share = float(counts_V[chosen].sum() / counts_V.sum().clamp(min=1))
    LOGGER.info("heads draft %d of %d tokens, %.2f %% of the supervised ones", size, vocab_size, 100 * share)
    return chosen
