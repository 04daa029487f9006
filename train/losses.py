"""The training loss: K cross entropies that share no memory with each other.

Shapes: M supervised rows, K heads, D hidden size, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from data.packing import IGNORE
from medusa.heads import DraftHeads, Vocabulary


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Cross entropy summed per head; the gradient is computed with the loss, one chunk of logits at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        features_KMD: Tensor,
        own_KVD: Tensor | None,
        labels_MK: Tensor,
        lm_head: Callable[[Tensor], Tensor],
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(features_KMD.dtype, torch.float32)
        loss_K = features_KMD.new_zeros(len(features_KMD), dtype=dtype)
        correct_K = labels_MK.new_zeros(len(features_KMD))
        grad_KMD = torch.zeros_like(features_KMD)
        grad_own_KVD = None if own_KVD is None else torch.zeros_like(own_KVD)
        for head in range(len(features_KMD)):
            rows = (labels_MK[:, head] != IGNORE).nonzero().squeeze(1)
            for chunk in rows.split(chunk_rows):
                with torch.enable_grad():
                    features = features_KMD[head, chunk].detach().requires_grad_()
                    own = None if own_KVD is None else own_KVD[head].detach().requires_grad_()
                    logits = lm_head(features) if own is None else functional.linear(features, own)
                scores = logits.detach().to(dtype)
                probs = scores.softmax(-1)
                targets = labels_MK[chunk, head].unsqueeze(1)
                target_scores, best_scores = scores.gather(1, targets), scores.amax(1, keepdim=True)
                # log sum exp = best score - log(best probability): no second pass of exponentials.
                loss_K[head] += (best_scores - probs.amax(1, keepdim=True).log() - target_scores).sum()
                correct_K[head] += (target_scores >= best_scores).sum()
                # d loss / d logits = softmax - one-hot, written over the probabilities.
                grad_logits = probs.scatter_add_(1, targets, probs.new_full(targets.shape, -1.0))
                inputs = (features,) if own is None else (features, own)
                grads = torch.autograd.grad(logits, inputs, grad_logits.to(logits.dtype))
                grad_KMD[head, chunk] = grads[0]
                if grad_own_KVD is not None:
                    grad_own_KVD[head] += grads[1]
        ctx.save_for_backward(grad_KMD, grad_own_KVD)
        ctx.mark_non_differentiable(correct_K)
        return loss_K, correct_K

    @staticmethod
    def backward(ctx: Any, grad_loss_K: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if grad is None else grad * grad_loss_K.to(grad.dtype)[:, None, None] for grad in ctx.saved_tensors
        ]
        return *scaled, None, None, None


def chunked_cross_entropy(
    features_KMD: Tensor,
    labels_MK: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    own_KVD: Tensor | None = None,
    chunk_rows: int = 512,
) -> tuple[Tensor, Tensor]:
    """Cross entropy of K heads that never keeps more than `chunk_rows` rows of logits.

    With the shared, frozen vocabulary matrix it costs two products per head: logits and gradient of the features.

    Args:
        features_KMD: vectors that the vocabulary matrix reads.
        labels_MK: int64 token ids, `IGNORE` where a head has no target.
        lm_head: [rows, D] -> [rows, V], frozen and differentiable; read only when `own_KVD` is None.
        own_KVD: the heads' own vocabulary matrices, trained too.
        chunk_rows: rows of logits that exist at a time.

    Returns:
        Sum of the cross entropy over the labelled rows per head [K], nats (differentiable), and the
        number of rows per head whose label has the highest logit [K], int64.
    """
    loss_K, correct_K = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        features_KMD, own_KVD, labels_MK, lm_head, chunk_rows
    )
    return loss_K, correct_K


class HeadsLoss(nn.Module):
    """Heads and their loss in one module, so that ZeRO sees every use of a parameter.

    Args:
        heads: the trained heads.
        vocabulary: both ends of the frozen base.
        chunk_rows: rows of logits that exist at a time.
    """

    def __init__(self, heads: DraftHeads, vocabulary: Vocabulary, chunk_rows: int) -> None:
        super().__init__()
        self.heads = heads
        self._vocabulary = vocabulary
        self._chunk_rows = chunk_rows

    def forward(
        self, hidden_MD: Tensor, path_MK: Tensor, labels_MK: Tensor, weights_K: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted loss of one micro-batch.

        Args:
            hidden_MD: the base's last hidden states at the supervised positions.
            path_MK: the K tokens after each of them, int64.
            labels_MK: int64 token ids, `IGNORE` where a head has no target.
            weights_K: lambda_k / number of labels of head k in the whole optimizer step.

        Returns:
            loss [] = sum of weights_k * summed cross entropy of head k; the sums [K]; the correct counts [K].
        """
        features_KMD = self.heads(hidden_MD, path_MK, self._vocabulary)
        loss_K, correct_K = chunked_cross_entropy(
            features_KMD, labels_MK, self._vocabulary.logits, self.heads.lm_heads, self._chunk_rows
        )
        return (loss_K * weights_K).sum(), loss_K.detach(), correct_K
