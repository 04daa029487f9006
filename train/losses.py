"""The trained module: heads and their loss.

Shapes: M positions, K heads, U teachers, D hidden size, F width of the base's hidden states, V vocabulary.
"""

import torch
from torch import Tensor, nn

from medusa.data.packing import IGNORE
from medusa.heads import DraftHeads, Vocabulary
from medusa.train.fused import fused_loss
from medusa.train.row_losses import Targets

CHUNK_NUMEL = {"cpu": 1 << 24, "cuda": 1 << 26}
"""Most logits that exist at a time: enough rows for a fast matrix product with any vocabulary."""


def chunk_rows(loss_rows: int, vocab_size: int, device: torch.device) -> int:
    """Rows of logits that exist at a time: `loss_rows`, or fewer if the vocabulary is large."""
    return min(loss_rows, max(2, CHUNK_NUMEL[device.type] // vocab_size))


class HeadsLoss(nn.Module):
    """Heads and their loss in one module, so that ZeRO sees every use of a parameter.

    If heads draft only a part of the vocabulary, other labels are ignored, and the distributions of the base are
    restricted to that part and normalised again.

    Args:
        heads: the trained heads.
        vocabulary: the base's embeddings and output layer.
        loss_rows: most rows of logits that exist at a time; a large vocabulary lowers it.
        kind: targets: ce = the labels; others = the base's own distribution at the labels' places, by Kullback-Leibler
            (kl) or total variation distance (tv = 1 - acceptance of drawn drafts; Leviathan et al. 2023, theorem 3.5),
            the logarithm of acceptance (nla), or a mixture that goes from kl to tv (lk; both Samarin et al. 2026).
    """

    def __init__(self, heads: DraftHeads, vocabulary: Vocabulary, loss_rows: int, kind: str = "ce") -> None:
        super().__init__()
        self.heads = heads
        self._vocabulary, self._output = vocabulary, heads.output(vocabulary)
        self._loss_rows, self._kind = loss_rows, kind

    def forward(
        self,
        hidden_MF: Tensor,
        path_MK: Tensor,
        labels_MK: Tensor,
        weights_K: Tensor,
        teacher_UD: Tensor | None = None,
        teacher_MK: Tensor | None = None,
        places_M: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted loss of one micro-batch; M = 0 gives 0 with a gradient of zeros for every parameter.

        Args:
            hidden_MF: the base's hidden states at the kept positions.
            path_MK: the K tokens after each of them, int64.
            labels_MK: int64 token ids, `IGNORE` where a head has no target.
            weights_K: lambda_k / number of labels of head k in the whole optimizer step.
            teacher_UD: the base's last hidden states whose distributions are the targets (all but ce).
            teacher_MK: int64, row of `teacher_UD` for each label.
            places_M: int64, positions in their documents, see `DraftHeads.forward`.

        Returns:
            loss [] = sum of weights_k * summed loss of head k; the sums [K]; number of labels with the highest logit
            [K].

        Raises:
            ValueError: a kind other than ce without teachers.
        """
        if self.heads.draft_ids is not None:
            columns_MK = self.heads.columns(labels_MK)
            labels_MK = torch.where(columns_MK < 0, IGNORE, columns_MK)
        targets = Targets(labels_MK, self._kind, teacher_UD, teacher_MK)
        features_KMD = self.heads(hidden_MF, path_MK, self._vocabulary, places_M, (labels_MK != IGNORE).any(1))
        rows = chunk_rows(self._loss_rows, self.heads.config.output_size, hidden_MF.device)
        own_KVD = self.heads.lm_heads
        shared = weights_K if own_KVD is not None and len(own_KVD) < len(features_KMD) else None
        loss_K, correct_K = fused_loss(features_KMD, targets, self._output, own_KVD, rows, shared)
        return (loss_K * weights_K).sum(), loss_K.detach(), correct_K
