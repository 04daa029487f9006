"""Steps that a drafter would take through a text that is known.

Lossless decoding writes the same text with any drafter; drafts decide only in how many steps. So they are proposed
from the base's hidden states along the text, and a step accepts what agrees with it: no tree is verified by the base,
and all texts go on at the same time. That the count is the one of real decoding is tested by decoding.

Shapes: B texts, T tokens, b rows of a batch, N tree nodes, K heads, F width of what heads read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from medusa.base.model import BaseModel
from medusa.drafters import Drafter
from medusa.state import DecodeState

BATCH = 16
"""Texts per pass of the base."""
CHUNK = 256
"""Drafts that are proposed together."""


@dataclass(frozen=True)
class Transcript:
    """Prompts with the answers that the base wrote.

    Attributes:
        tokens: [B, T] int64, padded at the end.
        before: [B, T, F], the hidden state at the token before each one (the one that predicted it); zero at first.
        first: [B] int64, index of the last token of the prompt: the first root.
        last: [B] int64, index of the last token of the answer.
    """

    tokens: Tensor
    before: Tensor
    first: Tensor
    last: Tensor

    @classmethod
    @torch.inference_mode()
    def of(cls, base: BaseModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> "Transcript":
        """Read texts with the base."""
        texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        width = max(map(len, texts))
        tokens_BT = torch.tensor([text + [0] * (width - len(text)) for text in texts], device=base.device)
        hidden_BTF = torch.cat([base.hidden_states(part) for part in tokens_BT.split(BATCH)])
        first_B = torch.tensor([len(prompt) - 1 for prompt in prompts], device=base.device)
        last_B = torch.tensor([len(text) - 1 for text in texts], device=base.device)
        return cls(tokens_BT, pad(hidden_BTF[:, :-1], (0, 0, 1, 0)), first_B, last_B)

    def state(self, rows_b: Tensor, roots_b: Tensor) -> DecodeState:
        """What a step starts from whose root is the token at ``roots_b`` of each text in ``rows_b``."""
        return DecodeState(
            roots=self.tokens[rows_b, roots_b],
            hidden=self.before[rows_b, roots_b],
            active=torch.ones_like(rows_b, dtype=torch.bool),
            history=self.tokens[rows_b],
            positions=roots_b,
            seeds=torch.zeros_like(rows_b),
            starts=torch.zeros_like(rows_b),
        )


@torch.inference_mode()
def accepted(drafter: Drafter, transcript: Transcript, rows_b: Tensor, roots_b: Tensor) -> Tensor:
    """Draft tokens [b] that a step from each of these roots accepts, as far as the text goes."""
    draft = drafter.propose(transcript.state(rows_b, roots_b))
    last_b1, places_bN = transcript.last[rows_b, None], roots_b[:, None] + draft.depths
    right_bN = draft.tokens == transcript.tokens[rows_b[:, None], places_bN.minimum(last_b1)]
    right_bN &= places_bN <= last_b1
    on_text_bN = ~(draft.ancestors & ~right_bN[:, None]).any(-1)
    return torch.where(on_text_bN, draft.depths, 0).amax(1)


def count_steps(drafter: Drafter, transcript: Transcript) -> Tensor:
    """Passes of the base [B] that each answer takes. The prompt's own brings the first token, without a draft."""
    steps_B = (transcript.first < transcript.last).long()
    roots_B = transcript.first + steps_B
    while len(rows_b := (roots_B < transcript.last).nonzero()[:, 0]):
        for part_b in rows_b.split(CHUNK):
            roots_B[part_b] += 1 + accepted(drafter, transcript, part_b, roots_B[part_b])
        steps_B[rows_b] += 1
    return steps_B


def chain_acceptance(drafter: Drafter, transcript: Transcript, num_heads: int) -> tuple[Tensor, Tensor]:
    """How often the head at each depth goes on rightly where all heads before it were right.

    Args:
        drafter: Drafts the best token of each head, one below the other (``Tree.chain``).
        transcript: The texts; each of their tokens is a root once.
        num_heads: K.

    Returns:
        Tries and hits [B, K] int64, summed over the roots of a text.
    """
    columns_T = torch.arange(transcript.tokens.shape[1], device=transcript.tokens.device)
    is_root_BT = (columns_T >= transcript.first[:, None]) & (columns_T < transcript.last[:, None])
    rows_M, roots_M = is_root_BT.nonzero().unbind(1)
    parts = zip(rows_M.split(CHUNK), roots_M.split(CHUNK), strict=True)
    lengths_M1 = torch.cat([accepted(drafter, transcript, *part) for part in parts])[:, None]
    depths_K = torch.arange(1, num_heads + 1, device=rows_M.device)
    in_text_MK = roots_M[:, None] + depths_K <= transcript.last[rows_M, None]
    tries_MK, hits_MK = (lengths_M1 >= depths_K - 1) & in_text_MK, lengths_M1 >= depths_K
    zeros_BK = torch.zeros(len(transcript.tokens), num_heads, dtype=torch.int64, device=rows_M.device)
    return zeros_BK.index_add(0, rows_M, tries_MK.long()), zeros_BK.index_add(0, rows_M, hits_MK.long())
