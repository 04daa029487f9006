"""Tests at load which drafts a base can verify, so that no family of models silently generates wrong text."""

import inspect
import logging

import torch
from torch import Tensor

from medusa.attention import Span, UnknownSpanError
from medusa.base.model import BaseModel
from medusa.base.traits import Decoding
from medusa.base.usual_block import UnusualBlockError
from medusa.cache import BLOCK, CachedSequence
from medusa.loading.layer_check import LayerCheck
from medusa.tree import Draft, Tree

logger = logging.getLogger(__name__)

LENGTHS = (40, 3)
"""Tokens of the prompts: one longer than small windows, one so short that each node has a large attention weight."""
OWN_PLACES = 4096
"""Most places that attention sees in tests of layers with their own attention code."""
CHUNK = 24
"""Tokens of a prompt per pass, more than the rows that kernels treat as few."""
TEXTS = 4
"""Texts of which one must be right in a fused pass. Rounding alone may exceed the limit in some, most of all where it
changes choices of experts; a fault appears in every text."""
LEAVES = (3, 4)
"""Leaves of ``TREE``: each sequence has a text for each of them."""
TREE = Tree.full([2, 1])
PATHS = [0, 0, 1, 0, 1]
"""Index of the leaf on whose path a node of ``TREE`` is."""
DRAFTS: dict[Decoding, list[int]] = {"tree": [0, 1, 2, 3, 4], "chain": [0, 1, 3], "plain": [0]}
"""Nodes of ``TREE`` that are verified; the most demanding way to decode comes first."""


class UnsupportedBaseError(ValueError):
    """The base's results over cached rows differ from those over plain text."""


def choose_decoding(base: BaseModel) -> BaseModel:
    """Find the first exact way to decode; returns the base with ``Traits.decoding`` and ``Traits.explicit_mask`` set.

    A few small passes over a small tree, a chain and single rows, behind cached prompts of different lengths, are
    compared with the base's own pass over each path as plain text: every layer by itself (``LayerCheck``), then the
    logits. A family that does not pass the step's plan on to its attention gets the whole mask with each call instead,
    unless it has sliding windows, which one mask for all layers cannot express. Trees fail if attention depends on rows
    instead of positions (ALiBi); everything fails if a layer keeps a state that is not known (Mamba 1).

    transformers gives the windows and chunks of layers (``BaseModel.spans``). They are not known for layers with their
    own attention code: such layers get as many places as the context has, the last of which are empty, so that a window
    over the last ones sees nothing and the test fails.

    Raises:
        UnsupportedBaseError: Even single rows are not exact.
    """
    reasons: dict[Decoding, str] = {}
    windows = _has_windows(base)
    for decoding, nodes in DRAFTS.items():
        for gathered, explicit_mask in ((False, False), (True, False), (False, True)):
            if explicit_mask and windows:
                continue
            tried = base.with_traits(decoding=decoding, gathered=gathered, explicit_mask=explicit_mask)
            reason = _objection(tried, nodes)
            if reason is None:
                _report(tried, reasons)
                return tried
            reasons[decoding] = reason
    raise UnsupportedBaseError(
        f"base ({base.name}, {base.config.model_type}) cannot be decoded here: {reasons['plain']};"
        " use one whose layers all keep keys and values, or states of a known kind"
    )


def _report(base: BaseModel, reasons: dict[Decoding, str]) -> None:
    if base.traits.explicit_mask:
        logger.info("base (%s): masks are passed with each call, since its attention takes no plan", base.name)
    if base.decoding != "tree":
        drafts = "drafts are chains" if base.decoding == "chain" else "it decodes plainly, one token per step"
        kind = base.config.model_type
        logger.warning("base (%s, %s) cannot verify trees: %s; %s", base.name, kind, reasons["tree"], drafts)


@torch.inference_mode()
def fuse(base: BaseModel) -> BaseModel:
    """The base with its pass in our own kernels, if its layers are the usual block and pass the same comparison.

    Otherwise the base is returned unchanged, and the reason is logged.
    """
    try:
        fused = base.with_fused_pass()
    except UnusualBlockError as error:
        logger.info("base (%s) runs as transformers does: %s", base.name, error)
        return base
    reason = None
    for text in range(TEXTS):
        reason = _objection(fused, DRAFTS[base.decoding], text)
        if reason is None:
            return fused
    logger.warning("base (%s) runs as transformers does, since in our kernels %s", base.name, reason)
    return base


def _has_windows(base: BaseModel) -> bool:
    try:
        return any(span != Span() for span in base.spans.values())
    except UnknownSpanError as error:
        raise UnsupportedBaseError(
            f"base ({base.name}, {base.config.model_type}) cannot be decoded here: {error}; use another base"
        ) from error


@torch.inference_mode()
def _objection(base: BaseModel, nodes: list[int], text: int = 0) -> str | None:
    """Why the base cannot verify these nodes behind one of some texts with its present traits; None if it can."""
    lengths = [max(1, min(length, base.context_length - TREE.nodes)) for length in LENGTHS]
    prompts = [[(7 * i + 13 * text + 3) % base.vocab_size for i in range(length)] for length in lengths]
    drafted = [(11 * i + 5) % base.vocab_size for i in range(1, TREE.nodes)]
    tokens_BN = torch.tensor([[prompt[-1], *drafted] for prompt in prompts], device=base.device)
    parents_BN = torch.tensor([[nodes.index(int(TREE.parents[node])) for node in nodes]] * len(prompts))
    draft = Draft.of(tokens_BN[:, nodes], parents_BN, TREE.depth)
    layers = LayerCheck(base.decoder, base.num_layers, None if base.int8 else base.dtype, base.fused)
    own_code = len(base.spans) < base.num_layers
    places = min(base.context_length, OWN_PLACES) if own_code else None
    try:
        with layers.recording():
            theirs_BNV = _sequential(base, prompts, drafted)[:, nodes]
        with layers.rounding():
            rounded_BNV = _sequential(base, prompts, drafted)[:, nodes]
        pool = base.new_pool(len(prompts) * ((places or max(lengths) + CHUNK) + BLOCK))
        sequences = [CachedSequence(pool) for _ in prompts]
        for index, (prompt, one) in enumerate(zip(prompts, sequences, strict=True)):
            size = 1 if base.decoding == "plain" else CHUNK
            for chunk in (prompt[first : first + size] for first in range(0, len(prompt) - 1, size)):
                chunk = chunk[: len(prompt) - 1 - one.length]  # all but the last token, which is the root
                plan = base.plan([(Draft.chain(torch.tensor([chunk], device=base.device)), [one])], places)
                with layers.replaying(index * len(LEAVES), compared=False):
                    base.run(pool, plan)
                one.length += len(chunk)
        texts = [index * len(LEAVES) + PATHS[node] for index in range(len(prompts)) for node in nodes]
        with layers.replaying(texts, compared=True):
            hidden_RF = base.run(pool, base.plan([(draft, sequences)], places))
        ours_BNV = base.logits(draft.spread(hidden_RF)).float()
    except (TypeError, AttributeError, RuntimeError, ValueError, IndexError, AssertionError, KeyError) as failure:
        said = (str(failure).splitlines() or [type(failure).__name__])[0]
        return f"its forward pass fails over cached rows (transformers: {said.rstrip('.')})"
    if theirs_BNV.isnan().any():
        raise UnsupportedBaseError(
            f"base ({base.name}) gives no numbers (NaN) for plain text: its weights are damaged, or too large for"
            f" {base.dtype}; copy it again, or load it in another dtype"
        )
    return layers.objection(ours_BNV, theirs_BNV, rounded_BNV if base.fused else None)


def _sequential(base: BaseModel, prompts: list[list[int]], drafted: list[int]) -> Tensor:
    """Logits [B, N, V] of every node of ``TREE``, from the loaded model with each path as plain text."""
    left, right, below_left, below_right = drafted
    texts = [[*prompt, *path] for prompt in prompts for path in ([left, below_left], [right, below_right])]
    longest = max(map(len, texts))
    padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=base.device)
    texts_B1 = 2 * torch.arange(len(prompts))[:, None]
    at_BN = torch.tensor([len(prompt) - 1 for prompt in prompts])[:, None] + torch.tensor([0, 1, 1, 2, 2])
    read_R = at_BN.unique()
    # If the vocabulary is large, the output layer is most of the work, and only a few of its rows are read.
    narrowed = "logits_to_keep" in inspect.signature(base.model.forward).parameters
    options = {"logits_to_keep": read_R} if narrowed else {}
    logits_PRV = base.model(input_ids=padded, use_cache=False, **options).logits
    rows_BN = torch.searchsorted(read_R, at_BN) if narrowed else at_BN
    logits_BNV: Tensor = logits_PRV[texts_B1 + torch.tensor(PATHS), rows_BN].to(base.device).float()
    return logits_BNV
