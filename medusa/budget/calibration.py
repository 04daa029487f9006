"""How often each head's r-th best token is the right one: what static trees are grown from."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa.files import header, read_json, write_json
from medusa.heads import DraftHeads, Vocabulary

RANKS = 16
"""R, ranks that are counted; what is worse than all of them is no hit."""
CHUNK = 256
"""Positions whose logits exist at a time."""
REMEDY = "remove it, or copy it again"


@dataclass(frozen=True)
class Calibration:
    """Exact-rank accuracies of heads, each of them given that the tokens before its own were right.

    Attributes:
        samples: Labels of each head; a text's last tokens are labels of the nearer heads only.
        hits: Per head, how often the label was its best token, its second best, ... [K][R].
        provenance: Heads, base, text and versions that the counts belong to.
    """

    samples: tuple[int, ...]
    hits: tuple[tuple[int, ...], ...]
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.samples) != len(self.hits) or len({len(row) for row in self.hits}) != 1:
            raise ValueError(
                f"calibration ({len(self.samples)} heads) needs a number of samples and equally many ranks for each"
                " head; correct it"
            )
        for head, (samples, row) in enumerate(zip(self.samples, self.hits, strict=True), 1):
            if min(row, default=0) < 0 or sum(row) > samples:
                raise ValueError(f"calibration of head {head} has {row} hits in {samples} samples; count again")

    @classmethod
    def of(cls, counts_KR: Tensor, provenance: dict[str, Any]) -> "Calibration":
        """From what ``count_ranks`` returns."""
        rows = counts_KR.tolist()
        return cls(tuple(row[0] for row in rows), tuple(tuple(row[1:]) for row in rows), provenance)

    @property
    def accuracies(self) -> list[list[float]]:
        """[K][R]: how often each head's r-th best token was right."""
        return [[hits / max(1, samples) for hits in row] for samples, row in zip(self.samples, self.hits, strict=True)]

    def top(self, ranks: int) -> list[float]:
        """Per head, how often one of its best ``ranks`` tokens was right."""
        return [sum(row[:ranks]) / max(1, samples) for samples, row in zip(self.samples, self.hits, strict=True)]

    def save(self, path: str | Path) -> None:
        """Write it as one JSON file, whole or not at all."""
        values = {"samples": self.samples, "hits": self.hits, "provenance": self.provenance}
        write_json(Path(path), header("calibration") | values)

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        """Read what ``save`` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is no calibration.
        """
        values = read_json(Path(path), "calibration", REMEDY)
        try:
            hits = tuple(tuple(map(_count, row)) for row in values["hits"])
            return cls(tuple(map(_count, values["samples"])), hits, dict(values.get("provenance", {})))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"calibration ({path}) is damaged: {error!r}; {REMEDY}") from error


@torch.no_grad()
def count_ranks(
    heads: DraftHeads, vocabulary: Vocabulary, hidden_MF: Tensor, path_MK: Tensor, labels_MK: Tensor
) -> Tensor:
    """Count at which rank each head has its label, given the tokens before it.

    Args:
        heads: The heads.
        vocabulary: Both ends of their base.
        hidden_MF: What heads read of the base, at M positions t.
        path_MK: Token ids at t + 1 .. t + K.
        labels_MK: Token ids at t + 2 .. t + 1 + K; negative where a head has no label.

    Returns:
        [K, 1 + R] int64 on the CPU: labels, then labels per rank. Counts add up.
    """
    counts_KR = torch.zeros(heads.config.num_heads, 1 + RANKS, dtype=torch.int64)
    for hidden, path, labels in zip(*(part.split(CHUNK) for part in (hidden_MF, path_MK, labels_MK)), strict=True):
        features_KMD = heads(hidden, path, vocabulary)
        for head, labels_M in enumerate(labels.unbind(1)):
            logits_MV = heads.head_logits(head, features_KMD[head], vocabulary)
            counts_KR[head, 0] += int((labels_M >= 0).sum())
            counts_KR[head, 1:] += rank_counts(logits_MV, heads.columns(labels_M))
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


def _count(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a number of labels")
    return value
