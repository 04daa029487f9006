"""Prefill in chunks, in the passes of other requests' decode steps or in separate passes."""

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
"""Trees of a pass, and the sequences that they continue."""


class Chunk:
    """The next tokens of a request's text, as one part of a pass.

    Args:
        request: The request.
        size: Number of tokens.

    Attributes:
        ends: Whether this is the last chunk.
        begins: Whether it is the last chunk of a new request, whose first token the pass gives.
        hidden: [F] the base's hidden state at the last token of the chunk, after the pass.
        logits: [V] the logits there, if the request begins.
    """

    hidden: Tensor
    logits: Tensor

    def __init__(self, request: Request, size: int) -> None:
        self.request, self.size, self.ends = request, size, size == request.missing
        self.begins = self.ends and not request.resumed

    @cached_property
    def part(self) -> Part:
        """The chunk as a chain behind the cached part of the text."""
        sequence = self.request.cached
        tokens = self.request.text[sequence.length : sequence.length + self.size]
        return Draft.chain(torch.tensor([tokens], device=sequence.pool.device)), [sequence]

    def take(self, base: BaseModel, hidden_CF: Tensor) -> None:
        """Take the hidden states [C, F] of the chunk's tokens after the pass."""
        sequence = self.request.cached
        first = sequence.length
        sequence.length += self.size
        sequence.pool.recurrent.settle(sequence.line, sequence.length)
        self.hidden = hidden_CF[-1]
        if self.request.unscored:
            self._score(base, hidden_CF, first)
        known = self.size - self.begins  # the token after the last is not known yet
        if sequence.observers and known:
            after = self.request.text[first + 1 : first + 1 + known]
            tell([sequence], hidden_CF[None, :known], torch.tensor([after], device=base.device), [known])

    def _score(self, base: BaseModel, hidden_CF: Tensor, first: int) -> None:
        """Add log-probabilities of the prompt's tokens that follow these and have none yet."""
        request, told = self.request, self.request.output.prompt_logprobs
        assert told is not None, "they were asked for"
        tokens, place = request.prompt[len(told) : first + self.size + 1], len(told) - 1 - first
        told += score(base, hidden_CF[place : place + len(tokens)], tokens, request.params.prompt_logprobs or 0)


@torch.inference_mode()
def advance(base: BaseModel, chunks: Sequence[Chunk]) -> None:
    """Compute chunks in a separate pass."""
    parts = [chunk.part for chunk in chunks]
    hidden_RF = base.run(parts[0][1][0].pool, base.plan(parts))
    take_chunks(base, hidden_RF, hidden_RF[:0], chunks)


def take_chunks(base: BaseModel, hidden_RF: Tensor, drafted_RF: Tensor, chunks: Sequence[Chunk]) -> Tensor:
    """Pass hidden states to chunks; the output layer is read once, for last tokens of texts and for nodes of trees.

    Args:
        base: The base.
        hidden_RF: Hidden states of the chunks' tokens, one chunk after the other.
        drafted_RF: Hidden states of nodes of trees in the same pass.
        chunks: The chunks of the pass.

    Returns:
        [R, V] logits at the drafted nodes.
    """
    for chunk, hidden_CF in zip(chunks, hidden_RF.split([chunk.size for chunk in chunks]), strict=True):
        chunk.take(base, hidden_CF)
    beginning = [chunk for chunk in chunks if chunk.begins]
    rows = torch.cat([drafted_RF, *(chunk.hidden[None] for chunk in beginning)])
    logits = base.logits(rows) if len(rows) else drafted_RF.new_empty(0, base.vocab_size)
    for chunk, logits_V in zip(beginning, logits[len(drafted_RF) :], strict=True):
        chunk.logits = logits_V
    return logits[: len(drafted_RF)]


def first_state(requests: Sequence[Request], hidden_BF: Tensor) -> DecodeState:
    """The state of requests whose last token is the root.

    Args:
        requests: The requests.
        hidden_BF: Hidden states at the last tokens that were computed.
    """
    texts, device = [request.text for request in requests], hidden_BF.device
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
