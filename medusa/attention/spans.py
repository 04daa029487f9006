"""Finds what each layer of a transformers model may see: full attention, a sliding window, or chunks.

Configs are not reliable: they name windows that no layer applies, and layers apply windows under many names. The truth
is the mask rule that a layer's attention gets in a plain pass, so a pass over two tokens records these rules. A rule is
a function of positions, and can be evaluated for positions far behind those two tokens.

This file needs only torch and transformers, because a copy of it is exported with heads.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

IMPLEMENTATION = "medusa_spans"
MOST = 1 << 20
"""Most positions that are tested; a larger window counts as full attention."""


class Span(NamedTuple):
    """The part of the earlier text that rows of a layer may see.

    Attributes:
        window: Sliding window in tokens; None = no window.
        chunk: Tokens of a chunk; a row sees only its own chunk; None = no chunks.
    """

    window: int | None = None
    chunk: int | None = None


def layer_spans(model: Any, decoder: nn.Module, length: int) -> dict[int | None, Span]:
    """The spans of all layers that use transformers' interfaces for masks and attention.

    Args:
        model: A causal language model of transformers; it is the same afterwards.
        decoder: The layers between its token ids and its output layer.
        length: Its context length; larger distances are not tested.

    Returns:
        Spans by layer index, without layers that have their own attention code, because theirs are not known.

    Raises:
        ValueError: The mask rule of a layer is neither a window nor chunks.
    """
    before = model.config._attn_implementation
    if not model._can_set_attn_implementation():
        return {}
    masks: list[tuple[Tensor, Span | None]] = []
    seen: dict[int | None, Span] = {}

    def note_mask(*args: Any, **options: Any) -> Tensor:
        mask: Tensor = sdpa_mask(*args, **options | {"allow_is_causal_skip": False, "use_vmap": False})
        masks.append((mask, _span(options["mask_function"], min(length, MOST))))
        return mask

    def note_layer(
        layer: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
    ) -> tuple[Tensor, None]:
        found = (span for mask, span in masks if _is_part(attention_mask, mask))
        span = Span() if attention_mask is None else next(found, None)
        index = getattr(layer, "layer_idx", None)
        if span is None or seen.setdefault(index, span) != span:
            raise UnknownSpanError(
                f"layer {'?' if index is None else index + 1} has a mask that is neither causal nor a window nor chunks"
            )
        return value.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(IMPLEMENTATION, note_layer)
    AttentionMaskInterface.register(IMPLEMENTATION, note_mask)
    device = next(decoder.parameters()).device
    tokens_1T = torch.ones(1, 2, dtype=torch.int64, device="cpu" if device.type == "meta" else device)
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        with torch.inference_mode():
            decoder(input_ids=tokens_1T, use_cache=False)
    finally:
        model.set_attn_implementation(before)
    return seen


def _is_part(mask: Tensor, known: Tensor) -> bool:
    """Whether this mask is a known one, or some rows of it, as layers get that compute only a text's last rows."""
    return mask.untyped_storage().data_ptr() == known.untyped_storage().data_ptr()


class UnknownSpanError(ValueError):
    """The mask rule of a layer cannot be applied to tree rows."""


def _span(rule: Callable[..., Tensor], length: int) -> Span | None:
    """The window or chunk that a rule describes up to ``length`` positions; None if it is another rule."""
    zero, positions_T = torch.zeros((), dtype=torch.int64), torch.arange(length)

    def sees(rows: Tensor, columns: Tensor) -> Tensor:
        return rule(zero, zero, rows, columns).expand(length)

    size = max(int(sees(positions_T, zero).long().cummin(0).values.sum()), 1)  # rows that see the first token
    rows = {k * size + offset for k in (0, 1, 2) for offset in (-1, 0, 1)} | {length - 1}
    spans = [Span(), Span(window=size), Span(chunk=size)]
    for row in sorted(row for row in rows if 0 <= row < length):
        seen_T, causal_T = sees(torch.tensor(row), positions_T), positions_T <= row
        firsts = {Span(): 0, Span(window=size): row - size + 1, Span(chunk=size): row // size * size}
        spans = [span for span in spans if torch.equal(seen_T, causal_T & (positions_T >= firsts[span]))]
    return next(iter(spans), None)
