"""What sampling settings make of the base's logits, at every tree row as plain decoding would at that place.

Legend: B batch, N tree nodes, V vocabulary, T tokens of the text so far.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper

from medusa.acceptance.path import Rule, Verdict
from medusa.state import DecodeState
from medusa.tree import Draft

LIKELIEST = 256
"""Tokens among which a nucleus is looked for first."""
LARGE = 2048
"""Vocabularies that are not sorted as fast as they are looked through."""


def widened(logits: Tensor) -> Tensor:
    """In float32 at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class Warper(NamedTuple):
    """What sampling settings make of logits: transformers' warpers, in its order, on rows of any shape."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __call__(self, logits: Tensor) -> Tensor:
        """Scores [..., V] in float32 at least; -inf for what is left out."""
        warpers = LogitsProcessorList()
        if self.top_k > 0:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(Nucleus(self.top_p))
        if self.min_p > 0:
            warpers.append(MinPLogitsWarper(self.min_p))
        logits = widened(logits)
        # The best is 0 and the others below: however low the temperature, none overflows to +inf.
        scaled = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        no_ids = torch.empty(0, dtype=torch.int64)
        return warpers(no_ids, scaled.flatten(0, -2)).view_as(scaled) if warpers else scaled


NO_NOISE = Warper(temperature=0.0)
"""Of what is not drawn: the likeliest tokens count."""


class Nucleus(LogitsProcessor):
    """Top-p that looks at the likeliest tokens first: on a CPU sorting a vocabulary costs as much as a small model.

    Tokens that are equally likely stay or go together. What becomes of a row depends on that row alone.
    """

    def __init__(self, top_p: float) -> None:
        self.top_p = top_p

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [R, V] with -inf for tokens that are less likely than others which have the mass ``top_p``."""
        few = scores.device.type == "cpu" and scores.shape[-1] >= LARGE
        return scores.masked_fill(scores < self._floor(scores, LIKELIEST if few else scores.shape[-1]), -math.inf)

    def _floor(self, scores_RV: Tensor, count: int) -> Tensor:
        """[R, 1] the lowest score that stays, looked for among so many tokens first."""
        whole = count == scores_RV.shape[-1]
        best_RK = scores_RV.sort(descending=True).values if whole else scores_RV.topk(count).values
        mass_RK = (best_RK - scores_RV.logsumexp(-1, keepdim=True)).exp()
        likelier_RK = mass_RK.cumsum(-1) - mass_RK
        floor_R1 = best_RK.masked_fill(likelier_RK >= self.top_p, math.inf).amin(-1, keepdim=True)
        if not whole:
            wide_R = likelier_RK[:, -1] < self.top_p
            if wide_R.any():
                floor_R1[wide_R] = self._floor(scores_RV[wide_R], scores_RV.shape[-1])
        return floor_R1


class Adjustment(NamedTuple):
    """What is done to logits before anything else; the fields of ``SamplingParams``."""

    bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


def adjusted(rule: Rule, adjustment: Adjustment, device: torch.device) -> Rule:
    """The rule over adjusted logits: the bias is added, then tokens that occurred before are made less likely.

    The order and the arithmetic are those of vLLM: the repetition penalty, over prompt and completion, divides positive
    logits and multiplies negative ones (``RepetitionPenaltyLogitsProcessor`` of transformers); the frequency penalty
    times the count, and the presence penalty, are subtracted for tokens of the completion. What occurred at a node is
    the text and the node's own path.

    Args:
        rule: Any rule.
        adjustment: What to do.
        device: Of the logits.
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
    """[B, N, V] float32: how often the token stands in the text and on the path from the root to the node.

    Args:
        draft: The trees.
        state: Their texts.
        vocab_size: V.
        first_B1: Where counting begins in the text; 0 = at its first token.
    """
    roots_B1, nodes = draft.tokens[:, :1], draft.tokens.shape[1]
    index_T = torch.arange(state.history.shape[1], device=roots_B1.device)
    counted_BT = (index_T >= first_B1) & (index_T <= state.positions[:, None])  # the root among them
    text_BT = torch.where(counted_BT, state.history, roots_B1)
    counts_BV = torch.zeros(len(roots_B1), vocab_size, device=roots_B1.device)
    counts_BV.scatter_add_(1, text_BT, counted_BT.float())
    drafted_BNN = draft.ancestors & (draft.depths > 0)[:, None]
    tokens_BNN = draft.tokens[:, None].expand(-1, nodes, -1)
    return counts_BV[:, None].repeat(1, nodes, 1).scatter_add_(2, tokens_BNN, drafted_BNN.float())
