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
"""Numbers n for top-n accuracy: how often the label is among a head's n best tokens."""
RANKS = max(TOP)
"""R, the number of ranks that are counted; lower ranks are misses."""
CHUNK = 256
"""Number of positions whose logits exist at a time."""
DOCUMENT_PROMPT = 32
"""Number of first tokens that serve as the prompt of a document without a prompt part."""


def head_accuracy(base: BaseModel, heads: DraftHeads, packed: PackedRows, rows: Tensor, batch_rows: int) -> Tensor:
    """Count the ranks of labels for each head, given that the tokens before them were drafted right.

    Args:
        base: the frozen model; this function taps the layers that the heads read.
        heads: the trained heads in the base's dtype, on its device.
        packed: held-out rows.
        rows: indices of the rows to read.
        batch_rows: rows per forward pass.

    Returns:
        int64 [K, 1 + R], see `count_ranks`; counts of processes can be added.
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
    """Count the ranks of labels for each head, given the tokens before them.

    Args:
        heads: The heads.
        vocabulary: The base's embeddings and output layer.
        hidden_MF: Hidden states of the base at M positions t.
        path_MK: Token ids at t + 1 .. t + K.
        labels_MK: Token ids at t + 2 .. t + 1 + K; negative where a head has no label.
        places_M: Positions in their documents, see `DraftHeads.forward`.

    Returns:
        [K, 1 + R] int64 on the CPU: number of labels, then of labels at each rank. Counts can be added.
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
    """The number of right columns at each rank: [R] int64 on the CPU.

    Of equal logits the lower column comes first, so that heads with equal logits for all tokens are not right.

    Args:
        logits_MV: Logits of a head.
        columns_M: The right columns; negative = not counted.
    """
    column_M1 = columns_M.clamp(min=0)[:, None]
    own_M1 = logits_MV.gather(1, column_M1)
    before_MV = torch.arange(logits_MV.shape[1], device=logits_MV.device) < column_M1
    # Not "greater": if a logit is not a number, the right column gets the worst rank.
    ranks_M = (~(logits_MV <= own_M1) | ((logits_MV == own_M1) & before_MV)).sum(1)
    return torch.bincount(ranks_M[(columns_M >= 0) & (ranks_M < RANKS)], minlength=RANKS).cpu()


def accuracy_figures(counts_KR: Tensor) -> dict[str, list[int] | list[float]]:
    """{"samples": [...], "top1": [...], ...}, one value per head, from the result of `count_ranks`."""
    samples_K, hits_KR = counts_KR[:, 0], counts_KR[:, 1:]
    shares = {f"top{ranks}": (hits_KR[:, :ranks].sum(1).double() / samples_K.clamp(min=1)).tolist() for ranks in TOP}
    return {"samples": samples_K.tolist(), **shares}


def held_out_rows(rows: int, count: int) -> Tensor:
    """Indices of `count` rows (0 = all) spread evenly, because packing puts the longest samples first.

    Returns:
        int64 [count], or fewer if there are fewer rows.
    """
    chosen = min(count or rows, rows)
    return torch.arange(chosen) * rows // max(1, chosen)


def held_out_prompts(samples: Sequence[Sample], count: int, longest: int) -> list[list[int]]:
    """Prompts of `count` evenly spread samples, at most `longest` tokens each.

    The prompt of a document without a prompt part is its first tokens.
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
    """Count steps and accepted drafts of greedy decoding with the heads alone.

    Args:
        model: The base with the heads.
        prompts: Token ids.
        max_new_tokens: Most tokens of an answer.
        nodes: Largest size of a tree.
        answers: Known answers of the base by prompt, which are not decoded again; new ones are added.

    Returns:
        int64 [2, 1 + K], see `tally`; counts can be added.
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
    """{"tokens_per_step": .., "acceptance": [..]}, one value per depth, from the result of `served_counts`."""
    tokens_per_step, *acceptance = (counts[0].double() / counts[1].clamp(min=1)).tolist()
    return {"tokens_per_step": tokens_per_step, "acceptance": acceptance}
