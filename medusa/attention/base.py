"""The attention function that transformers calls, and the plan that tells it what a step's rows may see.

The base stays an unmodified transformers model: the function is registered once under ``IMPLEMENTATION``, and the plan
of a step travels as a keyword argument of the forward call.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from medusa.attention.layers import rescale_queries, visible_span
from medusa.attention.reference import attend
from medusa.tree import Draft

IMPLEMENTATION = "medusa_tree"


class TreePlan:
    """What the N tree rows of each sequence may attend to: L cached rows and their own ancestors.

    Made once per step; masks are built on demand and shared by all layers of the same kind.

    Attributes:
        kv_length: Rows of the cache that attention reads, S.
    """

    def __init__(self, draft: Draft, lengths_B: Tensor, kv_length: int) -> None:
        self.draft = draft
        self.lengths = lengths_B
        self.kv_length = kv_length
        self._masks: dict[tuple[object, ...], Tensor] = {}

    @property
    def positions(self) -> Tensor:
        """[B, N] positions of the tree rows."""
        return self.lengths[:, None] + self.draft.depths

    def bias(
        self, groups: int, window: int | None, dtype: torch.dtype, device: torch.device, chunk: int | None = None
    ) -> Tensor:
        """Additive mask [B, 1, groups * N, S]: 0 where a row may look, -inf elsewhere.

        Args:
            groups: Query heads per key head; the rows repeat for each of them.
            window: Sliding window in tokens, by position and not by row; None for full attention.
            dtype: The dtype of the queries.
            device: Their device: the layers of a base may be spread over several.
            chunk: Rows see their own chunk of this many positions only; None for other layers.
        """
        key = (groups, window, chunk, dtype, device)
        if key not in self._masks:
            visible_BNS = self._visible(window, chunk).to(device)
            zero = torch.zeros((), dtype=dtype, device=device)
            self._masks[key] = torch.where(visible_BNS, zero, float("-inf")).repeat(1, groups, 1)[:, None]
        return self._masks[key]

    def _visible(self, window: int | None, chunk: int | None) -> Tensor:
        """[B, N, S] bool."""
        draft, lengths_B11 = self.draft, self.lengths[:, None, None]
        batch, nodes = draft.tokens.shape
        rows_S = torch.arange(self.kv_length, device=draft.tokens.device)
        visible_BNS = (rows_S < lengths_B11).expand(batch, nodes, -1).clone()
        tree_rows_BN = self.lengths[:, None] + torch.arange(nodes, device=rows_S.device)
        visible_BNS.scatter_(2, tree_rows_BN[:, None].expand(-1, nodes, -1), draft.ancestors)
        if window is None and chunk is None:
            return visible_BNS
        positions_BN = self.positions
        key_positions_BS = rows_S.expand(batch, -1).clone().scatter_(1, tree_rows_BN, positions_BN)
        first_BN = positions_BN - window + 1 if chunk is None else positions_BN // chunk * chunk  # type: ignore[operator]
        return visible_BNS & (key_positions_BS[:, None] >= first_BN[:, :, None])


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_plan: TreePlan | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer in transformers' calling convention.

    Without a plan (training, a plain forward pass) this is plain attention under transformers' own mask.

    Args:
        module: The attention layer.
        query: [B, H, N, D].
        key: [B, Hkv, S, D], cached rows and tree rows.
        value: [B, Hkv, S, Dv].
        attention_mask: Used without a plan only.
        tree_plan: The step's plan.
        scaling: Factor on the scores; None = 1 / sqrt(D).
        sliding_window: In tokens, where the layer has one.
        softcap: Scores become ``softcap * tanh(scores / softcap)`` where given.
        s_aux: [H] attention sinks, where the layer has them.

    Returns:
        Output [B, N, H, Dv] and None for the weights.
    """
    groups = query.shape[1] // key.shape[1]
    if tree_plan is not None:
        nodes = query.shape[2]
        query = rescale_queries(module, query, tree_plan.positions, first_row=tree_plan.kv_length - nodes)
        window, chunk = visible_span(module, sliding_window)
        bias = tree_plan.bias(groups, window, query.dtype, query.device, chunk)
    elif softcap is not None or s_aux is not None:
        bias = _additive(attention_mask, query, key).repeat(1, 1, groups, 1)
    else:
        out: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)[0]
        return out, None
    return attend(query, key, value, bias, scaling, softcap, s_aux).transpose(1, 2), None


def _additive(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """transformers' boolean mask [B, 1, N, S], or the causal one where it left that out, as 0 and -inf."""
    if mask is None:
        mask = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    return torch.where(mask, torch.zeros((), dtype=query.dtype, device=query.device), float("-inf"))


def register() -> None:
    """Make ``IMPLEMENTATION`` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, tree_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
