"""Sampling settings applied to the base's logits, at every tree node as plain decoding would at that position.

Legend: B batch, N tree nodes, R rows, V vocabulary, T tokens of the text so far, K most likely tokens.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper

from medusa.acceptance.path import Rule, Verdict
from medusa.state import DecodeState
from medusa.tree import Draft

LIKELIEST = 256
"""Number of most likely tokens among which a nucleus is looked for first."""
LARGE = 2048
"""Least vocabulary for which top-k selection is faster than sorting."""


def widened(logits: Tensor) -> Tensor:
    """The tensor in float32 at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class Warper(NamedTuple):
    """Applies temperature, top-k, top-p and min-p to logits of any shape, in transformers' order."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __call__(self, logits: Tensor) -> Tensor:
        """Scores [..., V] in float32 at least; -inf for excluded tokens."""
        logits = widened(logits)
        # The best score is 0, so no score overflows to +inf at low temperatures.
        scores = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        scores_RV, no_ids = scores.flatten(0, -2), torch.empty(0, dtype=torch.int64)
        if self.top_k > 0:
            scores_RV = TopKLogitsWarper(self.top_k)(no_ids, scores_RV)
        if self.top_p < 1:
            scores_RV = nucleus(scores_RV, self.top_p)
        if self.min_p > 0:
            scores_RV = MinPLogitsWarper(self.min_p)(no_ids, scores_RV)
        return scores_RV.view_as(scores)


NO_NOISE = Warper(temperature=0.0)
"""Settings without noise: drafts follow the most likely tokens."""


def nucleus(scores_RV: Tensor, top_p: float) -> Tensor:
    """The scores with -inf for tokens outside of the most likely ones with total probability ``top_p``.

    It looks at the most likely tokens first: sorting a vocabulary on a CPU costs as much as a small model. Equally
    likely tokens are kept or excluded together. The result of a row depends on that row only.
    """
    few = scores_RV.device.type == "cpu" and scores_RV.shape[1] >= LARGE
    floor_R1 = _floor(scores_RV, top_p, LIKELIEST if few else scores_RV.shape[1])
    return scores_RV.masked_fill(scores_RV < floor_R1, -math.inf)


def _floor(scores_RV: Tensor, top_p: float, count: int) -> Tensor:
    """The lowest kept score [R, 1], looked for among the ``count`` most likely tokens first."""
    whole = count == scores_RV.shape[1]
    best_RK = scores_RV.sort(descending=True).values if whole else scores_RV.topk(count).values
    mass_RK = (best_RK - scores_RV.logsumexp(-1, keepdim=True)).exp()
    likelier_RK = mass_RK.cumsum(-1) - mass_RK
    floor_R1 = best_RK.masked_fill(likelier_RK >= top_p, math.inf).amin(-1, keepdim=True)
    if not whole:
        wide_R = likelier_RK[:, -1] < top_p
        if wide_R.any():
            floor_R1[wide_R] = _floor(scores_RV[wide_R], top_p, scores_RV.shape[1])
    return floor_R1


class Adjustment(NamedTuple):
    """Penalties and biases that are applied to logits first; see ``SamplingParams``."""

    bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


def adjusted(rule: Rule, adjustment: Adjustment, device: torch.device) -> Rule:
    """The rule over adjusted logits: the bias is added, then tokens that occurred before are made less likely.

    Order and arithmetic are those of vLLM: the repetition penalty, over prompt and completion, divides positive
    logits and multiplies negative ones (``RepetitionPenaltyLogitsProcessor`` of transformers); the frequency penalty
    times the count, and the presence penalty, are subtracted for tokens of the completion. At a node, the
    tokens of the text and of the node's path count.

    Args:
        rule: Any rule.
        adjustment: The adjustment.
        device: Device of the logits.
    """
    ids_M = torch.tensor([token for token, _ in adjustment.bias], dtype=torch.int64, device=device)
    bias_M = torch.tensor([bias for _, bias in adjustment.bias], dtype=torch.float32, device=device)
    _, repetition, frequency, presence = adjustment

    def adjusting(draft: Draft, logits_BNV: Tensor, state: DecodeState) -> Verdict:
        logits_BNV = widened(logits_BNV)
        if len(ids_M) > 0:
            logits_BNV = logits_BNV.index_add(2, ids_M, bias_M.to(logits_BNV.dtype).expand(*logits_BNV.shape[:2], -1))
        if repetition != 1:
            rarer_BNV = torch.where(logits_BNV < 0, logits_BNV * repetition, logits_BNV / repetition)
            seen_BNV = occurrences(draft, state, logits_BNV.shape[-1], 0) > 0
            logits_BNV = torch.where(seen_BNV, rarer_BNV, logits_BNV)
        if frequency or presence:
            counts_BNV = occurrences(draft, state, logits_BNV.shape[-1], state.starts[:, None])
            logits_BNV = logits_BNV - frequency * counts_BNV - presence * (counts_BNV > 0)
        return rule(draft, logits_BNV, state)

    return adjusting


def occurrences(draft: Draft, state: DecodeState, vocab_size: int, first_B1: Tensor | int) -> Tensor:
    """[B, N, V] float32: number of occurrences of each token in the text and on the path from the root to the node.

    Args:
        draft: The trees.
        state: Their texts.
        vocab_size: V.
        first_B1: Position in the text from which tokens are counted.
    """
    roots_B1, nodes = draft.tokens[:, :1], draft.tokens.shape[1]
    index_T = torch.arange(state.history.shape[1], device=roots_B1.device)
    counted_BT = (index_T >= first_B1) & (index_T <= state.positions[:, None])  # including the root
    text_BT = torch.where(counted_BT, state.history, roots_B1)
    counts_BV = torch.zeros(len(roots_B1), vocab_size, dtype=torch.float32, device=roots_B1.device)
    counts_BV.scatter_add_(1, text_BT, counted_BT.float())
    drafted_BNN = draft.ancestors & (draft.depths > 0)[:, None]
    tokens_BNN = draft.tokens[:, None].expand(-1, nodes, -1)
    return counts_BV[:, None].repeat(1, nodes, 1).scatter_add_(2, tokens_BNN, drafted_BNN.float())
