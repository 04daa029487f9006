"""The rules: which drafted tokens the base agrees with. Pure functions on the device.

Legend: B batch, N tree nodes, V vocabulary, A longest path (depth of the draft + 1).
"""

import torch
from torch import Tensor

from medusa.acceptance.logits import Warper
from medusa.acceptance.path import Rule, Verdict
from medusa.acceptance.rejection import first_accepted, rejection_chances
from medusa.cpu import native, selection
from medusa.noise import gumbel_noise, uniform_noise
from medusa.state import DecodeState
from medusa.tree import Draft


def greedy(draft: Draft, logits_BNV: Tensor, state: DecodeState) -> Verdict:
    """Lossless at temperature 0: a token is allowed iff it is the base's argmax after its parent."""
    return Verdict(None, selection.argmax(logits_BNV))


def sampling(warper: Warper) -> Rule:
    """Lossless at temperature > 0: draw the base's own next token at every node; a child is allowed iff it equals it.

    The draw is Gumbel-max with noise keyed by (seed, absolute position, token id). So the text is that of plain
    sampling with the same seed, for any draft.

    Args:
        warper: The sampling settings.
    """

    def rule(draft: Draft, logits_BNV: Tensor, state: DecodeState) -> Verdict:
        return Verdict(None, _draw(draft, logits_BNV, state, warper))

    return rule


def speculative(warper: Warper) -> Rule:
    """Lossless in distribution: a child x that was drawn from q is allowed with probability min(1, p(x) / q(x)).

    Children are tried in their order. After each rejection p becomes norm(max(0, p - q)), and at the end of the path
    the bonus token is drawn from the remaining p. The text has the base's distribution, but for a given seed it depends
    on the draft; only ``sampling`` repeats plain sampling token by token. A draft that was not drawn has one-hot q. For
    it the rule equals ``sampling``: rejecting children in turn is the same as one draw that is compared with them.

    Source: Leviathan et al. 2023 and Chen et al. 2023 (chains), SpecInfer (Miao et al. 2023, trees).

    Args:
        warper: The sampling settings.
    """

    def rule(draft: Draft, logits_BNV: Tensor, state: DecodeState) -> Verdict:
        if draft.probs is None:
            return Verdict(None, _draw(draft, logits_BNV, state, warper))
        chances_BN, left_BNV = rejection_chances(draft, draft.probs, warper(logits_BNV).softmax(-1))
        uniform_BN = uniform_noise(state.seeds, state.positions[:, None] + draft.depths, draft.tokens)
        edges_BN = first_accepted(draft, uniform_BN < chances_BN)
        return Verdict(edges_BN, _draw(draft, left_BNV.log(), state, Warper()))

    return rule


def typical(warper: Warper, epsilon: float, delta: float) -> Rule:
    """Lossy: a token x is allowed iff p(x) > min(epsilon, delta * exp(-H(p))) (paper section 2.3.1).

    H is the entropy in nats of the processed (temperature-scaled) distribution p after the parent. The output does not
    follow the base's distribution; bonus tokens are drawn from it as ``sampling`` does.

    Args:
        warper: The sampling settings.
        epsilon: Hard threshold on the probability.
        delta: Factor on the entropy-dependent threshold.
    """

    def rule(draft: Draft, logits_BNV: Tensor, state: DecodeState) -> Verdict:
        logprobs_BNV = torch.log_softmax(warper(logits_BNV), -1)
        entropy_BN = torch.special.entr(logprobs_BNV.exp()).sum(-1)
        threshold_BN = torch.clamp(delta * torch.exp(-entropy_BN), max=epsilon)
        node_BNV = logprobs_BNV.gather(1, draft.parents[:, :, None].expand_as(logprobs_BNV))
        likelihood_BN = node_BNV.gather(2, draft.tokens[:, :, None])[:, :, 0]
        edges_BN = likelihood_BN.exp() > threshold_BN.gather(1, draft.parents)
        return Verdict(edges_BN, _draw(draft, logits_BNV, state, warper), likelihood_BN)

    return rule


def _draw(draft: Draft, logits_BNV: Tensor, state: DecodeState, warper: Warper) -> Tensor:
    """Draw one token [B, N] per node from the warped logits, a pure function of (seed, position, logits).

    Nodes of one depth share a position, and so the noise. Lossless acceptance needs this: if two drafters propose the
    same path, separate draws would favour the deeper of two continuations.
    """
    if native.reads(logits_BNV):
        keys_BN = selection.keys(state.seeds, state.positions[:, None] + 1 + draft.depths)
        return selection.draw(logits_BNV, keys_BN, *warper)
    ahead_A = torch.arange(1, draft.depth + 2, device=logits_BNV.device)
    noise_BAV = gumbel_noise(state.seeds, state.positions[:, None] + ahead_A, logits_BNV.shape[-1])
    batch_B1 = torch.arange(len(logits_BNV), device=logits_BNV.device)[:, None]
    return (warper(logits_BNV) + noise_BAV[batch_B1, draft.depths]).argmax(-1)
