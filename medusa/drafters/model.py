"""Drafting with a model: a smaller one, the base's first layers, or its multi-token-prediction layer.

The model continues from the root, token by token, and stops if the next pass would cost more than its guess is worth.
On a CPU its next best tokens are added to the tree as siblings.

Source: Leviathan et al. 2023 and Chen et al. 2023 (draft model), Elhoushi et al. 2024 (early exit).

Legend: B batch, N tree nodes, D hidden size, V vocabulary, W best tokens.
"""

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from medusa.acceptance.logits import NO_NOISE, Warper, widened
from medusa.cache import Cached, provisional
from medusa.cpu.selection import gumbel, keys
from medusa.drafters.base import Drafter
from medusa.drafters.merge import Node, best, build
from medusa.drafters.writers import Sequences, Writer
from medusa.noise import DRAFT, gumbel_noise
from medusa.state import DecodeState
from medusa.tree import Draft

WIDTH = 4
"""Best tokens per position in a tree on a CPU."""
FLOOR = math.log(0.1)
"""Score below which a guess is left out; not log(1 / N), since models were not looked at as heads and lookup were."""
ROW_COST = 0.1
"""Approximate cost of one more row to verify, in plain steps of the base."""


class ModelDrafter(Drafter):
    """Proposes the tokens that another model would write.

    Args:
        writer: The model.
        vocab_size: V of the base; the model's may have other padding.
        nodes: N, the root included, at least 2.
        cost: Time of one token of the model, in plain steps of the base; decides the length of drafts.
        host_decides: On a CPU: trees of different sizes, as long as they pay. Otherwise a chain of ``nodes``.
        noise: Sampling settings that drafts should follow; temperature 0 = draft the most likely tokens. If the base
            draws by seed and position, the model draws with the same noise.
        drawn: Draw with separate noise and report the distributions, for the ``speculative`` rule.
        width: Best tokens per position in a tree; 1 = a chain.
        stream: Stream of its separate noise; drafters that share a tree need different ones.

    Raises:
        ValueError: The budget leaves no room for a guess.
    """

    def __init__(
        self,
        writer: Writer,
        vocab_size: int,
        nodes: int,
        cost: float,
        host_decides: bool = True,
        noise: Warper = NO_NOISE,
        drawn: bool = False,
        width: int = WIDTH,
        stream: int = DRAFT,
    ) -> None:
        if nodes < 2:
            raise ValueError(f"nodes ({nodes}) must be at least 2 for a draft model; give a larger tree budget")
        self.nodes, self._writer, self._cost, self._noise = nodes, writer, cost, noise
        self._drawn, self._width = drawn and noise.temperature > 0, width
        self._host_decides = host_decides and not self._drawn and writer.device.type == "cpu"
        self._stream, self.observers = stream, writer.observers
        self._tokens_V = torch.arange(vocab_size, device=writer.device)

    def propose(self, state: DecodeState, cached: Cached = (), /) -> Draft:
        """A tree or chain below ``state.roots``; only the root if a text fills the model's context."""
        assert not isinstance(cached, Mapping), "steps of models that write are never recorded"
        last = self._writer.context_length - self.nodes
        drafting = [on and one.length < last for on, one in zip(state.active.tolist(), cached, strict=True)]
        if not any(drafting):
            return Draft.chain(state.roots[:, None])
        write = self._tree if self._host_decides else self._chain
        with self._writer.reading(state, cached, drafting) as (own, hidden_BD), provisional(own):
            return write(state, own, hidden_BD, drafting)

    def _logprobs(self, state: DecodeState, hidden_BD: Tensor, ahead: int) -> Tensor:
        """Log-probabilities [B, V] that each token is the base's next one, by the model.

        If the base draws the argmax of z / T + g with known noise g, they are those of softmax(z + T g).
        """
        logits_BV, heat = widened(self._writer.logits(hidden_BD)), self._noise.temperature
        logits_BV = pad(logits_BV, (0, len(self._tokens_V) - logits_BV.shape[1]), value=-math.inf)  # or cut
        if heat:
            logits_BV = self._noise(logits_BV)
            if not self._drawn:
                places_B = keys(state.seeds, state.positions[:, None] + 1 + ahead)[:, 0]
                logits_BV = heat * (logits_BV + gumbel(places_B, self._tokens_V))
        return logits_BV.log_softmax(-1)

    def _tree(self, state: DecodeState, own: Sequences, hidden_BD: Tensor, drafting: list[bool]) -> Draft:
        """Trees around the best chain, each as long as it pays."""
        trees = [[Node(root, 0, 0.0, 0)] for root in state.roots.tolist()]
        spines, expected = [0] * len(trees), [0.0] * len(trees)  # the chains' ends; expected right guesses
        for ahead in range(self.nodes - 1):
            top_BW = self._logprobs(state, hidden_BD, ahead).topk(min(self._width, len(self._tokens_V)))
            for row, (scores, tokens) in enumerate(zip(*(part.tolist() for part in top_BW), strict=True)):
                if not drafting[row]:
                    continue
                tree, above, first = trees[row], spines[row], len(trees[row])
                for score, token in zip(scores, tokens, strict=True):
                    score += tree[above].score
                    if score > FLOOR:
                        tree.append(Node(token, above, score, ahead + 1))
                drafting[row] = len(tree) > first
                if drafting[row]:
                    spines[row] = first
                    expected[row] += math.exp(tree[first].score)
                    drafting[row] = self._pays(tree[first].score, expected[row], ahead + 1)
            if ahead + 2 == self.nodes or not any(drafting):
                break
            tokens_B1 = torch.tensor([[tree[spine].token] for tree, spine in zip(trees, spines, strict=True)])
            hidden_BD = self._writer.write(own, tokens_B1, [int(on) for on in drafting], hidden_BD)
        return build([best(tree, self.nodes) for tree in trees])

    def _pays(self, score: float, expected: float, depth: int) -> bool:
        """Whether one more guess brings more tokens per second: its share of tokens exceeds its share of time."""
        cost = self._cost + ROW_COST
        return math.exp(score) / (1 + expected) > cost / (1 + depth * cost)

    def _chain(self, state: DecodeState, own: Sequences, hidden_BD: Tensor, drafting: list[bool]) -> Draft:
        """A chain of fixed length; the host does not wait for the model."""
        tokens, probs, missing = [state.roots[:, None]], [], [int(on) for on in drafting]
        for ahead in range(self.nodes - 1):
            if ahead:
                hidden_BD = self._writer.write(own, tokens[-1], missing, hidden_BD)
            scores_BV = self._logprobs(state, hidden_BD, ahead)
            if self._drawn:
                probs.append(scores_BV.exp())
                places_B1 = state.positions[:, None] + 1 + ahead
                scores_BV = scores_BV + gumbel_noise(state.seeds, places_B1, scores_BV.shape[1], self._stream)[:, 0]
            tokens.append(scores_BV.argmax(-1, keepdim=True))
        chain = Draft.chain(torch.cat(tokens, dim=1))
        if not self._drawn:
            return chain
        probs_BNV = torch.stack([torch.zeros_like(probs[0]), *probs], dim=1)
        return dataclasses.replace(chain, probs=probs_BNV)
