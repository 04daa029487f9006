"""Evaluation on held-out samples: per-head accuracy, and tokens per step as `MedusaModel.generate` serves them.

Shapes: B rows, T tokens, M positions, K heads, F width of the base's hidden states, V vocabulary.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from data.packing import IGNORE, PackedRows
from data.sources import Sample
from medusa.base_model import BaseModel
from medusa.heads import DraftHeads
from medusa.model import MedusaModel
from train.features import BasePass, Positions

RANKS = (1, 5, 10)
"""A head is right at rank r when its r best tokens hold the label."""
CHUNK = 256
"""Positions whose logits exist at a time."""
DOCUMENT_PROMPT = 32
"""Tokens of a document without a prompt part that are given to be continued."""


@torch.no_grad()
def head_accuracy(base: BaseModel, heads: DraftHeads, packed: PackedRows, rows: Tensor, batch_rows: int) -> Tensor:
    """Count how often each head's best tokens hold the label, given that the tokens before it were drafted right.

    Args:
        base: the frozen model; the layers that the heads read are tapped here.
        heads: the trained heads in the base's dtype, on its device.
        packed: held-out rows.
        rows: indices of the rows to read.
        batch_rows: rows per forward pass.

    Returns:
        int64 [1 + len(RANKS), K]: labels per head, then hits per rank and head; counts add up over processes.
    """
    base, num_heads = base.tapped(heads.config.feature_layers), heads.config.num_heads
    counts = torch.zeros(1 + len(RANKS), num_heads, dtype=torch.int64)
    for part in rows.split(batch_rows) if len(rows) else ():  # fewer rows than processes
        positions = Positions.of(packed, part, num_heads)
        tensors = BasePass(base, packed, num_heads, batch_rows).read(part), positions.path, positions.targets[:, 1:]
        for chunk in zip(*(tensor.split(CHUNK) for tensor in tensors), strict=True):
            hidden_MF, path_MK, labels_MK = (tensor.to(base.device) for tensor in chunk)
            features_KMD = heads(hidden_MF, path_MK, base)
            for head in range(num_heads):
                logits_MV, labels_M = heads.head_logits(head, features_KMD[head], base), labels_MK[:, head]
                columns_M = heads.columns(labels_M)  # a token that heads cannot draft is a miss
                better_M = (logits_MV > logits_MV.gather(1, columns_M.clamp(min=0)[:, None])).sum(1)
                hits = [labels_M != IGNORE, *((better_M < rank) & (columns_M >= 0) for rank in RANKS)]
                counts[:, head] += torch.stack(hits).sum(1).cpu()
    return counts


def accuracy_figures(counts: Tensor) -> dict[str, list[float]]:
    """Turn the counts of `head_accuracy` into {"samples": [...], "top1": [...], ...}, one value per head."""
    samples_K, hits_RK = counts[0], counts[1:]
    shares_RK = hits_RK / samples_K.clamp(min=1)
    return {"samples": samples_K.tolist()} | {
        f"top{rank}": share_K.tolist() for rank, share_K in zip(RANKS, shares_RK, strict=True)
    }


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
