"""Drafters that know what the base will write: always right, never right, and trees that are right now and then."""

import torch

from medusa.drafters import Drafter
from medusa.tree import Draft


class Chain(Drafter):
    """A chain of the next tokens of known texts, each shifted by ``off``: 0 is always right, 1 never.

    Texts are known by their first tokens: sequences of a batch stand in any order.
    """

    def __init__(self, texts, vocab_size, off=0, depth=4):
        longest = max(map(len, texts)) + 2 * depth
        self.texts = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        self.vocab_size, self.off, self.depth, self.nodes = vocab_size, off, depth, depth + 1

    def propose(self, state, cache=None):
        ahead = (state.positions[:, None] + torch.arange(1, self.depth + 1)).clamp(max=self.texts.shape[1] - 1)
        rows = (self.texts[:, 0] == state.history[:, :1]).int().argmax(1)
        guesses = (self.texts[rows].gather(1, ahead) + self.off) % self.vocab_size
        return Draft.chain(torch.cat([state.roots[:, None], guesses], dim=1))


class RandomTrees(Chain):
    """Another random topology for every sequence and step; half of the nodes hold the right token of their depth."""

    def __init__(self, texts, vocab_size, nodes=12):
        super().__init__(texts, vocab_size)
        self.nodes, self.generator = nodes, torch.Generator().manual_seed(0)

    def propose(self, state, cache=None):
        chain, index = super().propose(state, cache).tokens, torch.arange(self.nodes)
        parents = (torch.rand(len(chain), self.nodes, generator=self.generator) * index).long()
        depths = Draft.of(parents, parents, self.nodes).depths.clamp(max=self.depth)
        wrong = torch.randint(self.vocab_size, parents.shape, generator=self.generator)
        lucky = torch.rand(parents.shape, generator=self.generator) < 0.5
        tokens = torch.where(lucky | (index == 0), chain.gather(1, depths), wrong)
        return Draft.of(tokens, parents, self.nodes)
