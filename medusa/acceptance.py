"""Acceptance rules: which drafted tokens the base agrees with. Pure functions on the device.

Every rule has one shape: from the base's logits over all tree nodes to an edge mask [B, N] (the token of a node is
allowed after its parent) and one bonus token per node (the base's own next token there). What follows is shared:
the accepted path is the deepest node all of whose edges are accepted.

Legend: B batch, N tree nodes, V vocabulary, A longest path (depth of the draft + 1).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from medusa.tree import Draft

EPSILON = 0.09
DELTA = 0.3
RULES = ("greedy", "sampling", "typical")


@dataclass(frozen=True)
class Verdict:
    """What a rule says of every node.

    Attributes:
        edges: [B, N] bool, the node's token is allowed after its parent; the root's entry is not read.
        bonus: [B, N] int64, the base's own next token after each node.
        likelihood: [B, N] float32 log-probability of each node's token after its parent, for rules that allow several
            children of one node; None where at most one can be right.
    """

    edges: Tensor
    bonus: Tensor
    likelihood: Tensor | None = None


Rule = Callable[[Draft, Tensor, Tensor], Verdict]
"""(draft, base logits [B, N, V], absolute position [B, N] of the token that each node predicts) -> verdict."""


@dataclass(frozen=True)
class Accepted:
    """The accepted path of each sequence.

    Attributes:
        path: [B, A] node indices from the root on; beyond the path's end entry i is i.
        counts: [B] nodes on the path with the root, which is also the number of tokens that the step emits.
        tokens: [B, A] the emitted tokens: accepted draft tokens, then the bonus token; beyond ``counts`` undefined.
        leaf: [B] index of the path's last node.
        bonus: [B] the base's own token after the path.
    """

    path: Tensor
    counts: Tensor
    tokens: Tensor
    leaf: Tensor
    bonus: Tensor


def select_path(draft: Draft, verdict: Verdict) -> Accepted:
    """Take the deepest node whose edges are all accepted; among equally deep ones the most likely path."""
    if draft.depth == 0:  # plain decoding does not pay for trees
        zero_B1 = torch.zeros_like(draft.tokens)
        bonus_B = verdict.bonus[:, 0]
        return Accepted(zero_B1, torch.ones_like(bonus_B), verdict.bonus, zero_B1[:, 0], bonus_B)
    # A drafter that loses a parent must not lose the text: an edge counts only between neighbouring depths.
    edges_BN = verdict.edges & (draft.depths.gather(1, draft.parents) + 1 == draft.depths) | (draft.depths == 0)
    accepted_BN = (edges_BN[:, None] | ~draft.ancestors).all(-1)
    score_BN = torch.where(accepted_BN, draft.depths, -1).float()
    if verdict.likelihood is not None:
        inner_BN = torch.where(draft.depths == 0, 0.0, verdict.likelihood)
        path_BN = torch.where(draft.ancestors, inner_BN[:, None], 0.0).sum(-1)
        score_BN = score_BN + 0.5 * path_BN.exp()
    leaf_B1 = score_BN.argmax(-1, keepdim=True)
    counts_B = draft.depths.gather(1, leaf_B1)[:, 0] + 1
    bonus_B1 = verdict.bonus.gather(1, leaf_B1)

    batch, nodes = draft.tokens.shape
    index_N = torch.arange(nodes, device=draft.tokens.device)
    on_path_BN = draft.ancestors.gather(1, leaf_B1[:, :, None].expand(-1, 1, nodes))[:, 0]
    column_BN = torch.where(on_path_BN, draft.depths, draft.depth + 1)
    path_BA = torch.arange(draft.depth + 2, device=index_N.device).repeat(batch, 1)
    path_BA = path_BA.scatter_(1, column_BN, index_N.expand(batch, -1))[:, :-1]

    tokens_BA = draft.tokens.gather(1, path_BA).roll(-1, dims=1)
    tokens_BA = tokens_BA.scatter(1, counts_B[:, None] - 1, bonus_B1)
    return Accepted(path_BA, counts_B, tokens_BA, leaf_B1[:, 0], bonus_B1[:, 0])


def greedy(draft: Draft, logits_BNV: Tensor, positions_BN: Tensor) -> Verdict:
    """Lossless at temperature 0: a token is allowed iff it is the base's argmax after its parent."""
    if logits_BNV.dtype == torch.bfloat16 and logits_BNV.device.type == "cpu":
        logits_BNV = logits_BNV.float()  # the same tokens, three times as fast
    return _exact(draft, logits_BNV.argmax(-1))


def sampling(seeds_B: Tensor, process: Callable[[Tensor], Tensor]) -> Rule:
    """Lossless at temperature > 0: draw the base's own next token at every node; a child is allowed iff it equals it.

    The draw is Gumbel-max with noise keyed by (seed, absolute position, token id): the text is the one that plain
    sampling with the same seed writes, whatever was drafted.

    Args:
        seeds_B: [B] int64, one seed per sequence.
        process: Logits [..., V] to processed logits (temperature, top-k, top-p, min-p).
    """

    def rule(draft: Draft, logits_BNV: Tensor, positions_BN: Tensor) -> Verdict:
        return _exact(draft, _draw(draft, process(logits_BNV.float()), seeds_B, positions_BN))

    return rule


def typical(seeds_B: Tensor, process: Callable[[Tensor], Tensor], epsilon: float, delta: float) -> Rule:
    """Lossy: a token x is allowed iff p(x) > min(epsilon, delta * exp(-H(p))) (paper section 2.3.1).

    H is the entropy in nats of the processed (temperature-scaled) distribution p after the parent. The output does not
    follow the base's distribution; bonus tokens are drawn from it as ``sampling`` does.

    Args:
        seeds_B: [B] int64, one seed per sequence.
        process: Logits [..., V] to processed logits.
        epsilon: Hard threshold on the probability.
        delta: Factor on the entropy-dependent threshold.
    """

    def rule(draft: Draft, logits_BNV: Tensor, positions_BN: Tensor) -> Verdict:
        processed_BNV = process(logits_BNV.float())
        logprobs_BNV = torch.log_softmax(processed_BNV, -1)
        entropy_BN = torch.special.entr(logprobs_BNV.exp()).sum(-1)
        threshold_BN = torch.clamp(delta * torch.exp(-entropy_BN), max=epsilon)
        node_BNV = logprobs_BNV.gather(1, draft.parents[:, :, None].expand_as(logprobs_BNV))
        likelihood_BN = node_BNV.gather(2, draft.tokens[:, :, None])[:, :, 0]
        edges_BN = likelihood_BN.exp() > threshold_BN.gather(1, draft.parents)
        return Verdict(edges_BN, _draw(draft, processed_BNV, seeds_B, positions_BN), likelihood_BN)

    return rule


def build_rule(
    name: str | None,
    seeds_B: Tensor,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    epsilon: float = EPSILON,
    delta: float = DELTA,
) -> Rule:
    """The rule of one ``generate`` call.

    Args:
        name: One of ``RULES``; None = greedy at temperature 0 and sampling above. Typical is never chosen by itself.
        seeds_B: [B] int64 seeds.
        temperature: 0 = greedy decoding.
        top_k: Keep the k most likely tokens; 0 = all.
        top_p: Keep the smallest set of tokens with at least this probability; 1 = all.
        min_p: Keep tokens with at least this fraction of the best token's probability; 0 = all.
        epsilon: See ``typical``.
        delta: See ``typical``.

    Raises:
        ValueError: An unknown rule, a value out of its range, or a rule that contradicts the temperature.
    """
    name = name or ("sampling" if temperature > 0 else "greedy")
    if name not in RULES:
        raise ValueError(f"acceptance ({name!r}) is not known; choose one of: {', '.join(RULES)}")
    if (name == "greedy") != (temperature == 0):
        raise ValueError(f"acceptance {name!r} does not go with temperature {temperature}; greedy needs 0, others > 0")
    ranges = {
        "temperature": (temperature, 0.0, float("inf")),
        "top_k": (top_k, 0, float("inf")),
        "top_p": (top_p, 0.0, 1.0),
        "min_p": (min_p, 0.0, 1.0),
        "epsilon": (epsilon, 0.0, 1.0),
        "delta": (delta, 0.0, float("inf")),
    }
    for key, (value, low, high) in ranges.items():
        if not low <= value <= high:
            raise ValueError(f"{key} ({value}) must be between {low} and {high}; correct it")
    if top_p == 0:
        raise ValueError("top_p (0) leaves no token; give a value above 0, or 1 to switch it off")
    if name == "greedy":
        return greedy
    process = _processor(temperature, top_k, top_p, min_p)
    return sampling(seeds_B, process) if name == "sampling" else typical(seeds_B, process, epsilon, delta)


def _exact(draft: Draft, target_BN: Tensor) -> Verdict:
    """At every node exactly one token is right: the one that the base chose there."""
    return Verdict(draft.tokens == target_BN.gather(1, draft.parents), target_BN)


def _processor(temperature: float, top_k: int, top_p: float, min_p: float) -> Callable[[Tensor], Tensor]:
    """transformers' own warpers, in its order, on rows of any shape."""
    warpers = LogitsProcessorList()
    if top_k > 0:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        warpers.append(MinPLogitsWarper(min_p))
    no_ids = torch.empty(0, dtype=torch.int64)

    def process(logits: Tensor) -> Tensor:
        scaled = logits / temperature
        return warpers(no_ids, scaled.flatten(0, -2)).view_as(scaled) if warpers else scaled

    return process


def _draw(draft: Draft, processed_BNV: Tensor, seeds_B: Tensor, positions_BN: Tensor) -> Tensor:
    """One token [B, N] per node from softmax(processed), a pure function of (seed, position, processed logits)."""
    # Nodes of one depth share a position, and with it the noise.
    positions_BA = positions_BN[:, :1] + torch.arange(draft.depth + 1, device=positions_BN.device)
    noise_BAV = gumbel_noise(seeds_B, positions_BA, processed_BNV.shape[-1])
    batch_B1 = torch.arange(len(seeds_B), device=seeds_B.device)[:, None]
    return (processed_BNV + noise_BAV[batch_B1, draft.depths]).argmax(-1)


def gumbel_noise(seeds_B: Tensor, positions_BN: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [B, N, V] float32 from a counter-based hash of (seed, position, token id).

    ``-log(-log1p(-v))`` with v in (0, 1): float32 resolves v finest near 0, where the largest noise values come from.
    """
    # Every stage is salted: without salts, equal numbers (token id = position at seed 0) would cancel in the xor.
    seeds_B = _mix(seeds_B ^ 0x9E3779B9) ^ _mix((seeds_B >> 32) + 0x7F4A7C15)
    keys_BN = _mix(seeds_B[:, None] ^ _mix(positions_BN ^ 0x85EBCA6B))
    tokens_V = _mix(torch.arange(vocab_size, device=positions_BN.device) ^ 0xC2B2AE35)
    uniform_BNV = (_mix(keys_BN[:, :, None] ^ tokens_V).float() + 0.5) * 2.0**-32
    uniform_BNV.clamp_(max=1 - 2.0**-24)  # 1 would be minus infinity, like a token that a filter removed
    return -torch.log(-torch.log1p(-uniform_BNV))


def _mix(value: Tensor) -> Tensor:
    """A 32-bit integer finaliser (two rounds of xor-shift and multiply) on int64 tensors."""
    value = value & 0xFFFFFFFF
    value = ((value ^ (value >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    value = ((value ^ (value >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return value ^ (value >> 16)
