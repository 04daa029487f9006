"""Evaluation on held-out samples: per-head accuracy, and tokens per step as `MedusaModel.generate` serves them.

Shapes: B rows, T tokens, M positions, K heads, F width of the base's hidden states, V vocabulary.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from medusa.acceptance import build_rule
from medusa.base.model import BaseModel
from medusa.data.packing import PackedRows
from medusa.data.sources import Sample
from medusa.engine.replay import read, replay, tally
from medusa.heads import DraftHeads, Vocabulary
from medusa.model import MedusaModel
from medusa.sampling import Speculation
from medusa.train.features import BasePass, Positions

TOP = (1, 5, 10)
"""Figures tell how often the label is among so many of a head's best tokens."""
RANKS = max(TOP)
"""R, ranks that are counted; what is worse than all of them is no hit."""
CHUNK = 256
"""Positions whose logits exist at a time."""
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
        positions = Positions.of(packed, part, num_heads, heads.remembers)
        hidden_MF = BasePass(base, packed, num_heads, batch_rows, heads.remembers).read(part)
        kept = (positions.path, positions.targets[:, 1:], positions.places)
        counts_KR += count_ranks(heads, base, hidden_MF, *(tensor.to(base.device) for tensor in kept))
    return counts_KR


@torch.no_grad()
def count_ranks(
    heads: DraftHeads,
    vocabulary: Vocabulary,
    hidden_MF: Tensor,
    path_MK: Tensor,
    labels_MK: Tensor,
    places_M: Tensor | None = None,
) -> Tensor:
    """Count at which rank each head has its label, given the tokens before it.

    Args:
        heads: The heads.
        vocabulary: Both ends of their base.
        hidden_MF: What heads read of the base, at M positions t.
        path_MK: Token ids at t + 1 .. t + K.
        labels_MK: Token ids at t + 2 .. t + 1 + K; negative where a head has no label.
        places_M: Where the positions are in their documents, see `DraftHeads.forward`.

    Returns:
        [K, 1 + R] int64 on the CPU: labels, then labels per rank. Counts add up.
    """
    counts_KR = torch.zeros(heads.config.num_heads, 1 + RANKS, dtype=torch.int64)
    features_KMD = heads(hidden_MF, path_MK, vocabulary, places_M, (labels_MK >= 0).any(1))
    for head, (features_MD, labels_M) in enumerate(zip(features_KMD, labels_MK.unbind(1), strict=True)):
        asked_M = labels_M >= 0
        counts_KR[head, 0] += int(asked_M.sum())
        for features, labels in zip(features_MD[asked_M].split(CHUNK), labels_M[asked_M].split(CHUNK), strict=True):
            logits_MV = heads.head_logits(head, features, vocabulary)
            counts_KR[head, 1:] += rank_counts(logits_MV, heads.columns(labels))
    return counts_KR


def rank_counts(logits_MV: Tensor, columns_M: Tensor) -> Tensor:
    """How many of the right columns stand at each rank: [R] int64 on the CPU.

    Of equal logits the lower column comes first, as heads that cannot tell tokens apart must not count as right.

    Args:
        logits_MV: What a head says.
        columns_M: The right ones; negative = nothing is counted.
    """
    column_M1 = columns_M.clamp(min=0)[:, None]
    own_M1 = logits_MV.gather(1, column_M1)
    before_MV = torch.arange(logits_MV.shape[1], device=logits_MV.device) < column_M1
    # Not "greater": where a logit is not a number, the right column has the worst rank.
    ranks_M = (~(logits_MV <= own_M1) | ((logits_MV == own_M1) & before_MV)).sum(1)
    return torch.bincount(ranks_M[(columns_M >= 0) & (ranks_M < RANKS)], minlength=RANKS).cpu()


def accuracy_figures(counts_KR: Tensor) -> dict[str, list[int] | list[float]]:
    """{"samples": [...], "top1": [...], ...}, one value per head, from what `count_ranks` returns."""
    samples_K, hits_KR = counts_KR[:, 0], counts_KR[:, 1:]
    shares = {f"top{ranks}": (hits_KR[:, :ranks].sum(1).double() / samples_K.clamp(min=1)).tolist() for ranks in TOP}
    return {"samples": samples_K.tolist(), **shares}


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


def served_counts(
    model: MedusaModel,
    prompts: Iterable[Sequence[int]],
    max_new_tokens: int,
    nodes: int,
    answers: dict[tuple[int, ...], list[int]],
) -> Tensor:
    """What decoding prompts greedily with the heads alone takes, over whole outputs.

    Args:
        model: The base with the heads.
        prompts: Token ids.
        max_new_tokens: Of an answer.
        nodes: Of a tree.
        answers: What the base has said to prompts before; these are not decoded again. Those that are get in.

    Returns:
        int64 [2, 1 + K], see `tally`; counts add up.
    """
    base, num_heads = model.base, model.heads.config.num_heads if model.heads else 0
    speculation, pool = Speculation(drafter="heads", nodes=nodes), base.new_pool()
    drafter, counts = model.drafters.choose(speculation, 1, build_rule()), torch.zeros(2, 1 + num_heads).long()
    for prompt in map(tuple, prompts):
        if prompt not in answers:
            output = model.generate(list(prompt), max_new_tokens=max_new_tokens, speculation=speculation)
            answers[prompt] = output.tokens
        text = read(base, pool, prompt, answers[prompt])
        counts += tally(text, replay(base, drafter, text), num_heads)
    return counts


def served_figures(counts: Tensor) -> dict[str, float | list[float]]:
    """{"tokens_per_step": .., "acceptance": [..]}, one value per depth, from what `served_counts` returns."""
    tokens_per_step, *acceptance = (counts[0].double() / counts[1].clamp(min=1)).tolist()
    return {"tokens_per_step": tokens_per_step, "acceptance": acceptance}
