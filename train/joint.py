"""Joint training (Medusa-2): adapters change the base while the heads learn from it.

    loss = base's loss + lambda_0 * sum over heads k of lambda_k * loss of head k

The base's loss keeps the base close to the original: it is the distance between its next-token distributions with and
without adapters, or the cross entropy of the text. Source: Cai et al. 2024, section 2.2.2 and equation 2.

Shapes: B rows, T tokens, M kept positions, K heads, C = 1 + K columns (the base, then the heads), D hidden size, F
width of the base's hidden states (D, or a multiple of it with feature layers).
"""

import torch
from torch import Tensor, nn

from medusa.base.model import BaseModel
from medusa.heads import DraftHeads
from medusa.train.adapters import Adapters
from medusa.train.fused import fused_loss
from medusa.train.losses import HeadsLoss, chunk_rows
from medusa.train.row_losses import Targets


class JointLoss(HeadsLoss):
    """Heads and adapters with their common loss; the base itself is not part of the module.

    Args:
        heads: the trained heads.
        base: the base that the adapters are in.
        adapters: the trained adapters.
        base_loss: kl = distance to the original base; ce = cross entropy of the labels.
        heads_loss: a kind of `HeadsLoss`; the adapted base is the teacher.
        loss_rows: most rows of logits that exist at a time.
    """

    def __init__(
        self, heads: DraftHeads, base: BaseModel, adapters: Adapters, base_loss: str, heads_loss: str, loss_rows: int
    ) -> None:
        super().__init__(heads, base, loss_rows, heads_loss)
        # A parameter's name must not contain a dot.
        named = {name.replace(".", "/"): parameter for name, parameter in adapters.parameters().items()}
        self.adapters = nn.ParameterDict(named)
        self._base, self._off, self._base_loss = base, adapters.off, base_loss

    def forward(  # type: ignore[override]
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor,
        kept_BT: Tensor,
        path_MK: Tensor,
        targets_MC: Tensor,
        weights_C: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted loss of some packed rows; M = 0 gives 0 with a gradient of zeros for every parameter.

        Args:
            input_ids_BT: int64.
            position_ids_BT: int64; a 0 begins a document.
            kept_BT: bool; M positions at which the base or a head has a target.
            path_MK: int64; the tokens t+1 .. t+K after each of them.
            targets_MC: int64 token ids t+1 .. t+1+K, `IGNORE` where there is no target.
            weights_C: weight of each column / number of its targets in the whole optimizer step. If the base's is 0,
                only the heads train, and the adapters get a gradient of zeros.

        Returns:
            loss [] = sum of weights_c * summed loss of column c; the sums [C]; how often the target had the highest
            logit [C].
        """
        rows, adapting = (input_ids_BT, position_ids_BT, kept_BT), bool(weights_C[0])
        original_MD = self._original(*rows) if adapting and self._base_loss == "kl" else None
        with torch.set_grad_enabled(adapting):
            hidden_MF = self._hidden(self._base, *rows, training=adapting)
        last_MD = hidden_MF[:, : self._base.hidden_size]
        teacher_MK = _places(last_MD) + torch.arange(1, path_MK.shape[1] + 1, device=last_MD.device)
        labels_MK, weights_K = targets_MC[:, 1:], weights_C[1:]
        heads, loss_K, correct_K = super().forward(
            hidden_MF, path_MK, labels_MK, weights_K, last_MD.detach(), teacher_MK, position_ids_BT[kept_BT]
        )
        loss_1, correct_1 = self._of_base(last_MD, targets_MC[:, :1], original_MD) if adapting else self._rest()
        loss_C, correct_C = torch.cat([loss_1.detach(), loss_K]), torch.cat([correct_1, correct_K])
        return heads + (loss_1 * weights_C[:1]).sum(), loss_C, correct_C

    def _hidden(
        self, base: BaseModel, ids_BT: Tensor, positions_BT: Tensor, kept_BT: Tensor, training: bool = False
    ) -> Tensor:
        """Hidden states [M, F], at least float32; `training`: with dropout, also when the pass is recomputed."""
        base.model.train(training)
        hidden_MF = base.hidden_states(ids_BT, positions_BT)[kept_BT]
        return hidden_MF.to(torch.promote_types(hidden_MF.dtype, torch.float32))

    @torch.no_grad()
    def _original(self, ids_BT: Tensor, positions_BT: Tensor, kept_BT: Tensor) -> Tensor:
        with self._off():
            return self._hidden(self._base.tapped(()), ids_BT, positions_BT, kept_BT)

    def _of_base(self, last_MD: Tensor, labels_M1: Tensor, original_MD: Tensor | None) -> tuple[Tensor, Tensor]:
        targets = Targets(labels_M1, self._base_loss, original_MD, _places(last_MD))
        rows = chunk_rows(self._loss_rows, self._base.vocab_size, self._base.device)
        return fused_loss(last_MD[None], targets, self._base.logits, chunk_rows=rows)

    def _rest(self) -> tuple[Tensor, Tensor]:
        """No loss of the base, but zero gradients, because ZeRO waits for the gradient of every parameter."""
        nothing = torch.stack([parameter.sum() for parameter in self.adapters.values()]).sum() * 0.0
        return nothing[None], torch.zeros(1, dtype=torch.int64, device=nothing.device)


def _places(last_MD: Tensor) -> Tensor:
    return torch.arange(len(last_MD), device=last_MD.device)[:, None]
