"""Texts are computed before they are continued: in chunks, beside the steps of others or in passes of their own."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from medusa.base.model import BaseModel
from medusa.cache import CachedSequence, tell
from medusa.engine.logprobs import score
from medusa.engine.request import Request
from medusa.state import DecodeState
from medusa.tree import Draft

Part = tuple[Draft, Sequence[CachedSequence]]
"""Trees of a pass, and the sequences that they go on from."""


class Chunk:
    """The next tokens of a request's text, as one part of a pass.

    Args:
        request: Whose.
        size: How many tokens.

    Attributes:
        ends: They are the last ones: the pass brings the first new token.
        hidden: [F] the base's hidden state at the last of them, once they are computed.
        logits: [V] likewise, where they end the text.
    """

    def __init__(self, request: Request, size: int) -> None:
        self.request, self.size, self.ends = request, size, size == request.missing
        self.hidden: Tensor | None = None
        self.logits: Tensor | None = None

    @cached_property
    def part(self) -> Part:
        """A chain behind what is cached of the text."""
        sequence = self.request.cached
        tokens = self.request.text[sequence.length : sequence.length + self.size]
        return Draft.chain(torch.tensor([tokens], device=sequence.pool.device)), [sequence]

    def take(self, base: BaseModel, hidden_CF: Tensor) -> None:
        """The tokens are computed: these are their hidden states."""
        sequence = self.request.cached
        first = sequence.length
        sequence.length += self.size
        self.hidden = hidden_CF[-1]
        if self.request.unscored:
            self._score(base, hidden_CF, first)
        known = self.size - self.ends  # the token after the last is not known yet
        if sequence.observers and known:
            after = self.request.text[first + 1 : first + 1 + known]
            tell([sequence], hidden_CF[None, :known], torch.tensor([after], device=base.device), [known])

    def _score(self, base: BaseModel, hidden_CF: Tensor, first: int) -> None:
        """Tell the log-probabilities of the prompt's tokens that follow these and were not told before."""
        request, told = self.request, self.request.output.prompt_logprobs
        assert told is not None, "they were asked for"
        tokens, place = request.prompt[len(told) : first + self.size + 1], len(told) - 1 - first
        told += score(base, hidden_CF[place : place + len(tokens)], tokens, request.params.prompt_logprobs or 0)


@torch.inference_mode()
def advance(base: BaseModel, chunks: Sequence[Chunk]) -> None:
    """Compute chunks in a pass of their own."""
    parts = [chunk.part for chunk in chunks]
    hidden_RF = base.run(parts[0][1][0].pool, base.plan(parts))
    take_chunks(base, hidden_RF, hidden_RF[:0], chunks)


def take_chunks(base: BaseModel, hidden_RF: Tensor, drafted_RF: Tensor, chunks: Sequence[Chunk]) -> Tensor:
    """Hand chunks their hidden states; the output layer is read once, for their last tokens and for drafted ones.

    Args:
        base: The base.
        hidden_RF: Hidden states of the chunks' tokens, one chunk behind the other.
        drafted_RF: Hidden states of nodes of trees in the same pass.
        chunks: What was computed.

    Returns:
        [R, V] logits at the drafted nodes.
    """
    for chunk, hidden_CF in zip(chunks, hidden_RF.split([chunk.size for chunk in chunks]), strict=True):
        chunk.take(base, hidden_CF)
    ending = [chunk for chunk in chunks if chunk.ends]
    rows = torch.cat([drafted_RF, *(chunk.hidden[None] for chunk in ending if chunk.hidden is not None)])
    logits = base.logits(rows) if len(rows) else drafted_RF.new_empty(0, base.vocab_size)
    for chunk, logits_V in zip(ending, logits[len(drafted_RF) :], strict=True):
        chunk.logits = logits_V
    return logits[: len(drafted_RF)]


def first_state(base: BaseModel, requests: Sequence[Request], hidden_BF: Tensor) -> DecodeState:
    """The state of requests whose texts are computed to their last token, which is the root.

    Args:
        base: The base.
        requests: Whose.
        hidden_BF: At the last tokens.
    """
    texts, device = [request.text for request in requests], base.device
    width = max(map(len, texts)) + 1  # room for the next token
    history = [[*text, *([0] * (width - len(text)))] for text in texts]
    return DecodeState(
        roots=torch.tensor([text[-1] for text in texts], device=device),
        hidden=hidden_BF,
        active=torch.ones(len(texts), dtype=torch.bool, device=device),
        history=torch.tensor(history, device=device),
        positions=torch.tensor([len(text) - 1 for text in texts], device=device),
        seeds=torch.tensor([request.params.seed or 0 for request in requests], device=device),
        starts=torch.tensor([len(request.prompt) for request in requests], device=device),
    )
