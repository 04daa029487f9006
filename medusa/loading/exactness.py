"""Are passes over the same tokens equal bit by bit, whatever rows they are computed with? Tried out once at load.

Where they are, what is decoded is plain decoding's in any dtype. Where they are not, it is so up to near ties: sums
are rounded differently, and the two likeliest tokens may change places.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from medusa.base.model import BaseModel
from medusa.base.verify import verify
from medusa.cache import SlotCache
from medusa.tree import Draft

logger = logging.getLogger(__name__)

LENGTH = 140
"""Tokens of the text, fewer in a shorter context: more than a block of keys in the exact attention."""
TREE_PARENTS = (0, 0, 0, 2, 2, 4, 3)
TREE_PATH = (0, 2, 4, 5)
"""Nodes that continue the text; the others are wrong guesses, between them and behind them."""


def find_out(base: BaseModel) -> BaseModel:
    """The base with what was found (``Traits.exact``), which is logged too; a few short passes."""
    reason = _known(base) or _difference(base)
    if reason is None:
        logger.info("base (%s): exact, rows are equal bit by bit in passes of any size", base.name)
    else:
        logger.info("base (%s): not exact, near ties may go another way than in plain decoding: %s", base.name, reason)
    return base.with_traits(exact=reason is None)


def _known(base: BaseModel) -> str | None:
    if base.device.type != "cpu":
        return f"kernels of {base.device.type} choose the order of their sums by shapes"
    if base.explicit_mask or base.attention.name != "exact":
        how = "gets its masks with each call" if base.explicit_mask else f"is {base.attention.name}"
        return f"its attention {how}, whose sums depend on where keys stand"
    return None


@torch.inference_mode()
def _difference(base: BaseModel) -> str | None:
    """Which passes over one text differ from the pass over all of it at once; None where none does."""
    length = min(LENGTH, base.context_length)
    text = [(7 * i * i + 13 * i + 3) % base.vocab_size for i in range(length)]
    other = [(token + 1) % base.vocab_size for token in text]
    if base.decoding == "plain":
        ways = {"a row beside another sequence's": ([text, other], [1] * length)}
        expected = _passes(base, [text], [1] * length)
    else:
        tail = [length - 14, 1, 1, 3, 5, 4]
        ways = {
            "passes of 1, 3, 4 and 5 rows": ([text], tail),
            "rows beside another sequence's": ([text, other], [length - 41, 33, 1, 7]),
        }
        expected = _passes(base, [text], [length])
    for name, (texts, chunks) in ways.items():
        if not torch.equal(_passes(base, texts, chunks), expected):
            return f"{name} differ from those of one pass"
    if base.decoding == "tree" and not torch.equal(_tree(base, text), expected[length - len(TREE_PATH) :]):
        return "rows of a tree differ from those of one pass"
    return None


def _passes(base: BaseModel, texts: Sequence[list[int]], chunks: Sequence[int]) -> Tensor:
    """Hidden states and logits [T, F + V] of the first text, computed in passes of these numbers of rows."""
    tokens_BT, cache = torch.tensor(texts), base.new_cache(len(texts), len(texts[0]))
    return torch.cat([_chain(base, cache, tokens_BC) for tokens_BC in tokens_BT.split(list(chunks), dim=1)])


def _chain(base: BaseModel, cache: SlotCache, tokens_BC: Tensor) -> Tensor:
    hidden_BCF = verify(base, cache, Draft.chain(tokens_BC))
    count = tokens_BC.shape[1]
    cache.extend(torch.full_like(cache.lengths, count))
    cache.grow([count] * cache.slots)
    return _outcome(base, hidden_BCF)


def _tree(base: BaseModel, text: list[int]) -> Tensor:
    """The same of the text's last tokens as a path of a tree that holds wrong guesses too."""
    start = len(text) - len(TREE_PATH)
    cache = base.new_cache(1, len(text) + len(TREE_PARENTS))
    _chain(base, cache, torch.tensor([text[:start]]))
    tokens = [(text[start] + 5 * node) % base.vocab_size for node in range(len(TREE_PARENTS))]
    for node, token in zip(TREE_PATH, text[start:], strict=True):
        tokens[node] = token
    draft = Draft.of(torch.tensor([tokens]), torch.tensor([TREE_PARENTS]), len(tokens))
    return _outcome(base, verify(base, cache, draft))[list(TREE_PATH)]


def _outcome(base: BaseModel, hidden_BNF: Tensor) -> Tensor:
    return torch.cat([hidden_BNF[0], base.logits(hidden_BNF)[0].to(hidden_BNF.dtype)], dim=-1)
