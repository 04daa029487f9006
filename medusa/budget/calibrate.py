"""Calibrate heads that have no calibration: ask each of them for every token that the base writes."""

from collections.abc import Sequence

import torch
import transformers
from torch import Tensor

from medusa.budget.calibration import RANKS, Calibration, count_ranks
from medusa.heads import DraftHeads
from medusa.model import MedusaModel

BATCH = 8
"""Prompts that are answered together."""


def calibrate(
    model: MedusaModel, prompts: Sequence[list[int]], max_new_tokens: int = 128, source: str = ""
) -> Calibration:
    """Calibrate heads that have no calibration: the base answers prompts, then each head is asked for every token.

    Args:
        model: A base with heads.
        prompts: Token ids, none that the heads were trained on.
        max_new_tokens: Limit per answer.
        source: Where the prompts come from, for the provenance.

    Raises:
        ValueError: There are no heads or no prompts, or the answers are so short that a head has no label.
    """
    if model.heads is None or not prompts:
        raise ValueError(f"calibration needs heads and prompts ({len(prompts)}); load a model with heads, give prompts")
    config = model.heads.config
    counts_KR = torch.zeros(config.num_heads, 1 + RANKS, dtype=torch.int64)
    for first in range(0, len(prompts), BATCH):
        part = list(prompts[first : first + BATCH])
        for prompt, output in zip(part, model.generate(part, max_new_tokens=max_new_tokens, nodes=1), strict=True):
            counts_KR += _answer_counts(model, model.heads, prompt, output.tokens)
    if not counts_KR[-1, 0]:
        raise ValueError(
            f"answers ({len(prompts)}) are too short for head {config.num_heads} to guess in; give more prompts or a"
            " larger max_new_tokens"
        )
    provenance = {
        "heads": f"{config.num_heads} {config.architecture}",
        "base": model.base.name,
        "data": {"source": source, "answers": len(prompts), "max_new_tokens": max_new_tokens},
        "dtype": str(model.base.dtype).removeprefix("torch."),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    return Calibration.of(counts_KR, provenance)


@torch.no_grad()
def _answer_counts(model: MedusaModel, heads: DraftHeads, prompt: list[int], answer: list[int]) -> Tensor:
    """What ``count_ranks`` says of one text, from the step whose root is the prompt's last token on."""
    num_heads, base = heads.config.num_heads, model.base
    tokens_T, missing = torch.tensor([*prompt, *answer]), torch.full((num_heads,), -1)
    first, last = max(0, len(prompt) - 2), len(tokens_T) - 2  # the positions t
    if first == last:  # a prompt and an answer of one token each
        return torch.zeros(num_heads, 1 + RANKS, dtype=torch.int64)
    hidden_TF = base.hidden_states(tokens_T[None].to(base.device))[0]
    ahead_TK = torch.cat([tokens_T, missing]).unfold(0, num_heads, 1)
    path_MK, labels_MK = ahead_TK[first + 1 : last + 1].clamp(min=0), ahead_TK[first + 2 : last + 2]
    return count_ranks(heads, base, hidden_TF[first:last], path_MK.to(base.device), labels_MK.to(base.device))
