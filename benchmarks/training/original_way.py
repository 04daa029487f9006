"""A trainer as the original's authors wrote theirs, for comparison (github.com/FasterDecoding/Medusa).

Conversations are padded to one length; every head has a block and a vocabulary matrix of its own; K float32 logits
exist at every position; the loss ignores what is not supervised; AdamW trains everything. Nothing is slower than this
needs to be: the base is an unmodified transformers model without gradients, and products run in its dtype.

Shapes: B conversations, T tokens, K heads, D hidden size, V vocabulary.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM

from data.packing import IGNORE
from data.sources import Sample
from medusa.base import smollm2
from train.config import OptimRecipe


class _Head(nn.Module):
    """``W2 (x + SiLU(W1 x + b1))`` with W1 = 0, b1 = 0 and W2 the base's at the start."""

    def __init__(self, lm_head_VD: Tensor) -> None:
        super().__init__()
        vocab, hidden = lm_head_VD.shape
        self.linear = nn.Linear(hidden, hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.lm_head.weight.data.copy_(lm_head_VD)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        logits_BTV: Tensor = self.lm_head(hidden_BTD + functional.silu(self.linear(hidden_BTD)))
        return logits_BTV


class OriginalTrainer:
    """Heads of the original in a plain training loop.

    Args:
        base: directory or Hub id.
        dtype: of the base and, by autocast, of all products.
        device: where.
        num_heads: K.
        optim: learning rate, decay, clipping and weights of the heads.

    Attributes:
        parameters: what is trained.
    """

    def __init__(self, base: str, dtype: torch.dtype, device: torch.device, num_heads: int, optim: OptimRecipe) -> None:
        model = AutoModelForCausalLM.from_pretrained(smollm2.locate(base), dtype=dtype)
        model = model.to(device).eval().requires_grad_(False)
        self._decoder, lm_head_VD = model.get_decoder(), model.get_output_embeddings().weight
        self._heads = nn.ModuleList(_Head(lm_head_VD) for _ in range(num_heads)).to(device)
        self.parameters = list(self._heads.parameters())
        self._optim, self._device, self._dtype = optim, device, dtype
        self._adamw = torch.optim.AdamW(self.parameters, optim.lr, weight_decay=optim.weight_decay, fused=True)

    def step(self, micro_batches: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        """One optimizer step over padded micro-batches of `pad`."""
        self._adamw.zero_grad()
        for batch in micro_batches:
            ids_BT, mask_BT, labels_BT = (tensor.to(self._device) for tensor in batch)
            (self._loss(ids_BT, mask_BT, labels_BT) / len(micro_batches)).backward()
        clip_grad_norm_(self.parameters, self._optim.clip_norm or float("inf"))
        self._adamw.step()

    def _loss(self, ids_BT: Tensor, mask_BT: Tensor, labels_BT: Tensor) -> Tensor:
        with torch.no_grad():
            hidden_BTD = self._decoder(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).last_hidden_state
        half = self._dtype != torch.float32
        with torch.autocast(self._device.type, self._dtype, enabled=half):
            logits_KBTV = [head(hidden_BTD).float() for head in self._heads]
        losses = [
            self._optim.head_decay ** (ahead - 2)
            * functional.cross_entropy(
                logits_BTV[:, :-ahead].flatten(0, 1), labels_BT[:, ahead:].flatten(), ignore_index=IGNORE
            )
            for ahead, logits_BTV in enumerate(logits_KBTV, start=2)
        ]
        return torch.stack(losses).sum()


def pad(samples: Sequence[Sample], max_tokens: int, to_longest: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, attention mask and labels, int64 [B, T] each.

    Args:
        samples: conversations; the rest of longer ones is lost.
        max_tokens: T.
        to_longest: T is the length of the longest, if that is less.
    """
    length = min(max_tokens, max(len(sample.input_ids) for sample in samples)) if to_longest else max_tokens

    def padded(rows: Iterable[Tensor]) -> Tensor:
        return torch.stack([functional.pad(row[:length], (0, max(0, length - len(row)))) for row in rows])

    ids_BT = padded(sample.input_ids for sample in samples).long()
    mask_BT = padded(torch.ones_like(sample.input_ids) for sample in samples).long()
    supervised_BT = padded(sample.loss_mask for sample in samples)
    return ids_BT, mask_BT, torch.where(supervised_BT, ids_BT, IGNORE)
