"""Evaluation on held-out samples: per-head accuracy, and tokens per step as `MedusaModel.generate` serves them.

Shapes: B rows, T tokens, M positions, K heads, F width of the base's hidden states, V vocabulary.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from data.packing import PackedRows
from data.sources import Sample
from medusa.base.model import BaseModel
from medusa.budget.calibration import RANKS, Calibration, count_ranks
from medusa.heads import DraftHeads
from medusa.model import MedusaModel
from train.features import BasePass, Positions

TOP = (1, 5, 10)
"""Figures tell how often the label is among so many of a head's best tokens."""
DOCUMENT_PROMPT = 32
"""Tokens of a document without a prompt part that are given to be continued."""


def head_accuracy(base: BaseModel, heads: DraftHeads, packed: PackedRows, rows: Tensor, batch_rows: int) -> Tensor:
    """Count at which rank each head has its label, given that the tokens before it were drafted right.

    Args:
        base: the frozen model; the layers that the heads read are tapped here.
        heads: the trained heads in the base's dtype, on its device.
        packed: held-out rows.
        rows: indices of the rows to read.
        batch_rows: rows per forward pass.

    Returns:
        int64 [K, 1 + R] as `count_ranks` makes them; counts add up over processes.
    """
    base, num_heads = base.tapped(heads.config.feature_layers), heads.config.num_heads
    counts_KR = torch.zeros(num_heads, 1 + RANKS, dtype=torch.int64)
    for part in rows.split(batch_rows) if len(rows) else ():  # fewer rows than processes
        positions = Positions.of(packed, part, num_heads)
        hidden_MF = BasePass(base, packed, num_heads, batch_rows).read(part)
        path_MK, labels_MK = positions.path.to(base.device), positions.targets[:, 1:].to(base.device)
        counts_KR += count_ranks(heads, base, hidden_MF, path_MK, labels_MK)
    return counts_KR


def accuracy_figures(calibration: Calibration) -> dict[str, list[int] | list[float]]:
    """{"samples": [...], "top1": [...], ...}, one value per head."""
    return {"samples": list(calibration.samples), **{f"top{ranks}": calibration.top(ranks) for ranks in TOP}}


def held_out_rows(rows: int, count: int) -> Tensor:
    """Indices of `count` rows (0 = all) spread over all of them: packing puts the longest samples first.

    Returns:
        int64 [count], or fewer where there are fewer rows.
    """
    chosen = min(count or rows, rows)
    return torch.arange(chosen) * rows // max(1, chosen)


def held_out_prompts(samples: Sequence[Sample], count: int, longest: int) -> list[list[int]]:
    """Prompts of `count` samples spread over all of them, at most `longest` tokens each.

    A document, which has no prompt part, gives its first tokens.
    """
    chosen = samples[:: max(1, len(samples) // count)][:count]
    prompts = [sample.prompt or sample.input_ids[:DOCUMENT_PROMPT].tolist() for sample in chosen]
    return [prompt[:longest] for prompt in prompts]


def served_tokens(
    model: MedusaModel, prompts: Iterable[Sequence[int]], max_new_tokens: int, nodes: int
) -> tuple[int, int]:
    """Decode prompts greedily with the heads alone.

    Returns:
        Tokens emitted and verify steps taken, over whole outputs.
    """
    tokens = steps = 0
    for prompt in prompts:
        output = model.generate(list(prompt), max_new_tokens=max_new_tokens, nodes=nodes, drafter="heads")
        tokens, steps = tokens + len(output.tokens), steps + output.steps
    return tokens, steps
