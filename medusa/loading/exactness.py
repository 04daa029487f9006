"""Tests at load whether a row is equal bit by bit in every pass, whatever other rows are computed with it.

If so, decoded text equals plain decoding's in any dtype. If not, it is equal up to near ties: sums are rounded
differently, so the two likeliest tokens may change places.
"""

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from medusa.base.model import BaseModel
from medusa.cache import CachedSequence
from medusa.cpu.int8 import Int8Linear
from medusa.cpu.native import NativeLinear
from medusa.cpu.packed import PackedEmbedding, PackedLinear
from medusa.tree import Draft

logger = logging.getLogger(__name__)

OURS = (nn.Embedding, nn.Conv1d, NativeLinear, PackedLinear, PackedEmbedding, Int8Linear)
"""Layers with matrices whose rows are equal whatever stands beside them."""
LENGTH = 140
"""Tokens of the text, fewer if the context is shorter; more than a block of keys in the exact attention."""
TREE_PARENTS = (0, 0, 0, 2, 2, 4, 3)
TREE_PATH = (0, 2, 4, 5)
"""Nodes that continue the text; the others are wrong guesses, between and after them."""
READ = 41
"""Rows at the end of the text whose logits are compared, because the output layer is slow if the vocabulary is large.
It reads this many rows at once, and 33, 27, 7, 5, 4, 3 and 1. Hidden states are compared in all rows."""


def find_out(base: BaseModel) -> BaseModel:
    """Run a few short passes; returns the base with the result (``Traits.exact``), which is also logged."""
    reason = _known(base) or _difference(base)
    if reason is None:
        logger.info("base (%s): exact, rows are equal bit by bit in passes of any size", base.name)
    else:
        logger.info("base (%s): not exact, near ties may differ from plain decoding: %s", base.name, reason)
    return base.with_traits(exact=reason is None)


def _known(base: BaseModel) -> str | None:
    if base.device.type != "cpu":
        return f"kernels of {base.device.type} choose the order of their sums by shapes"
    if base.traits.explicit_mask or base.attention.name != "exact":
        how = "gets its masks with each call" if base.traits.explicit_mask else f"is {base.attention.name}"
        return f"its attention {how}, whose sums depend on where keys stand"
    for name, module in base.model.named_modules() if not base.fused else ():
        if not isinstance(module, OURS) and any(weight.dim() > 1 for weight in module.parameters(recurse=False)):
            return f"torch computes {name} ({type(module).__name__}), and its sums depend on the number of rows"
    return None


@torch.inference_mode()
def _difference(base: BaseModel) -> str | None:
    """Which passes over a text differ from one pass over the whole text; None if none does."""
    length = min(LENGTH, base.context_length)
    text = [(7 * i * i + 13 * i + 3) % base.vocab_size for i in range(length)]
    other = [(token + 1) % base.vocab_size for token in text]
    if base.decoding == "plain":
        ways = {"a row beside another sequence's": ([other, text], [1] * length)}
        expected = _passes(base, [text], [1] * length)
    else:
        tail = [length - 14, 1, 1, 3, 5, 4]
        ways = {
            "passes of 1, 3, 4 and 5 rows": ([text], tail),
            "rows beside another sequence's": ([other, text], [length - READ, 33, 1, 7]),
        }
        expected = _passes(base, [text], [length])
    for name, (texts, chunks) in ways.items():
        if not _equal(_passes(base, texts, chunks), expected):
            return f"{name} differ from those of one pass"
    if base.decoding == "tree":
        last = tuple(rows[-len(TREE_PATH) :] for rows in expected)
        if not _equal(_tree(base, text), last):
            return "rows of a tree differ from those of one pass"
    return None


def _equal(rows: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    return all(torch.equal(ours, theirs) for ours, theirs in zip(rows, expected, strict=True))


def _passes(base: BaseModel, texts: Sequence[list[int]], chunks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Hidden states [T, F] and the last logits [READ, V] of the last text, in passes of these numbers of rows."""
    sequences = _sequences(base, len(texts))
    passes, end = [], 0
    for count in chunks:
        part = torch.tensor([text[end : end + count] for text in texts])
        end += count
        passes.append(_outcome(base, _chain(base, sequences, part)[-count:], end - len(texts[0]) + READ))
    hidden, logits = zip(*passes, strict=True)
    return torch.cat(hidden), torch.cat(logits)


def _sequences(base: BaseModel, count: int) -> list[CachedSequence]:
    pool = base.new_pool(4 * LENGTH)
    return [CachedSequence(pool) for _ in range(count)]


def _chain(base: BaseModel, sequences: Sequence[CachedSequence], tokens_BC: Tensor) -> Tensor:
    """Hidden states [B * C, F] of the next tokens of each text."""
    hidden_RF = base.run(sequences[0].pool, base.plan([(Draft.chain(tokens_BC), sequences)]))
    for one in sequences:
        one.length += tokens_BC.shape[1]
    return hidden_RF


def _tree(base: BaseModel, text: list[int]) -> tuple[Tensor, Tensor]:
    """Like ``_passes``, with the text's last tokens as a path of a tree that also has wrong guesses."""
    start, sequences = len(text) - len(TREE_PATH), _sequences(base, 1)
    _chain(base, sequences, torch.tensor([text[:start]]))
    tokens = [(text[start] + 5 * node) % base.vocab_size for node in range(len(TREE_PARENTS))]
    for node, token in zip(TREE_PATH, text[start:], strict=True):
        tokens[node] = token
    draft = Draft.of(torch.tensor([tokens]), torch.tensor([TREE_PARENTS]), len(tokens))
    hidden_NF = base.run(sequences[0].pool, base.plan([(draft, sequences)]))
    hidden_NF, logits_NV = _outcome(base, hidden_NF, len(tokens))
    path = list(TREE_PATH)
    return hidden_NF[path], logits_NV[path]


def _outcome(base: BaseModel, hidden_NF: Tensor, read: int) -> tuple[Tensor, Tensor]:
    """Hidden states of a sequence, and the logits of its last rows, at most ``read``."""
    return hidden_NF, base.logits(hidden_NF[max(0, len(hidden_NF) - max(0, read)) :])
