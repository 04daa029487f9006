"""Drafters from what a model has to draft with."""

import copy
import logging

from medusa.acceptance.logits import Warper
from medusa.base.model import BaseModel
from medusa.drafters.base import Drafter, PlainDrafter
from medusa.drafters.early_exit import EarlyExitDrafter, ExitLayer
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.hybrid import HybridDrafter
from medusa.drafters.model import WIDTH, ModelDrafter
from medusa.drafters.ngram import KEPT, NgramCache, NgramDrafter
from medusa.drafters.prompt_lookup import BELIEFS, LOOKUP_GUESSES, PLACES, Confidence, PromptLookupDrafter
from medusa.drafters.sampled import SampledHeadsDrafter
from medusa.drafters.writers import MtpWriter, SmallModel
from medusa.heads import DraftHeads
from medusa.noise import OTHER_DRAFTS
from medusa.sampling import sources
from medusa.tree import Tree

logger = logging.getLogger(__name__)

MODELS = frozenset({"draft-model", "early-exit", "mtp"})
"""Drafters that are models, and draw their drafts under the ``speculative`` rule."""
COSTLY = MODELS | {"heads", "heads-sampled"}
"""Drafters whose drafts cost time, and which heed the noise of draws."""


class Parts:
    """What there is to draft with.

    Args:
        base: Prepared for decoding, with its own layer for drafts where that was loaded.
        heads: Its heads, frozen; None = there are none.
        draft_model: A smaller model of the same tokens, prepared for decoding; None = there is none.
        host_decides: Shapes cost nothing, and asking for a number does not stop a device.

    Attributes:
        ngrams: What followed short contexts in the completions of requests that name "ngram".
    """

    def __init__(
        self, base: BaseModel, heads: DraftHeads | None, draft_model: BaseModel | None, host_decides: bool
    ) -> None:
        self.base, self.heads, self.draft_model, self.host_decides = base, heads, draft_model, host_decides
        self.ngrams = NgramCache()
        self._looked_up, self._exit = Confidence(BELIEFS), ExitLayer(base)

    def with_heads(self, heads: DraftHeads | None) -> "Parts":
        """The same with other heads; what was learned is shared."""
        parts = copy.copy(self)
        parts.heads = heads
        return parts

    def build(self, name: str, nodes: int, tree: Tree | None, noise: Warper, drawn: bool) -> Drafter:
        """The drafter of a name.

        Args:
            name: One that ``sources`` knows, and whose parts are there.
            nodes: N, the root included.
            tree: A static tree instead, for heads.
            noise: Draws that drafts should follow, or are drawn as.
            drawn: Drafts are drawn.

        Raises:
            ValueError: The tree, or so few nodes, cannot be drafted.
        """
        base, heads = self.base, self.heads
        if base.decoding == "chain" and tree is not None and tree.depth + 1 < tree.nodes:
            raise ValueError(
                f"tree ({tree.nodes} nodes, depth {tree.depth}) branches and the base ({base.name}) verifies"
                f" chains only; give Tree.chain({tree.depth})"
            )
        if base.decoding == "plain":
            plain = "drafter (%s, %d nodes) is left out: base (%s) decodes plainly"
            logger.warning(plain, name, nodes, base.name)
            return PlainDrafter()
        host_decides, chain, names = self.host_decides, base.decoding == "chain", sources(name)
        if chain and heads is not None:
            tree = tree or Tree.chain(min(nodes - 1, heads.config.num_heads))
        if name == "heads-sampled":
            assert heads is not None, "checked by the caller"
            return SampledHeadsDrafter(heads, base, nodes, noise.temperature, tree)
        if not host_decides:  # each needs a node of its own
            names = tuple(sorted(names, key=lambda source: source not in COSTLY)[: nodes - 1])
        # On a CPU the best nodes of all stay; where shapes are fixed, each has its part of them.
        alone, width = len(names) == 1, 1 if chain else WIDTH
        costly = [source for source in names if source in COSTLY]
        share = (
            nodes if alone or host_decides else 1 + max(1, min(nodes // 2, LOOKUP_GUESSES) // max(1, len(names) - 1))
        )
        cheap: list[Drafter] = []
        if "prompt-lookup" in names:
            most = share if alone else min(share, LOOKUP_GUESSES + 1)
            cheap.append(PromptLookupDrafter(most, 2, host_decides, self._looked_up, 1 if chain else PLACES))
        if "ngram" in names:
            cheap.append(NgramDrafter(self.ngrams, share, 1 if chain else KEPT))
        kept = nodes if alone or host_decides else max(2, (nodes - (share - 1) * len(cheap)) // max(1, len(costly)))
        dear: list[Drafter] = []
        warmth = 0.0 if drawn else noise.temperature  # beside draws, what is chosen may not know the base's noise
        if "heads" in names:
            assert heads is not None, "checked by the caller"
            dear.append(HeadsDrafter(heads, base, kept, tree, host_decides, temperature=warmth))
        if "draft-model" in names:
            small = self.draft_model
            assert small is not None, "checked by the caller"
            cost, writer = small.weight_bytes / base.weight_bytes, SmallModel(small)
            dear.append(ModelDrafter(writer, base.vocab_size, kept, cost, host_decides, noise, drawn, width))
        if "mtp" in names:
            cost = 1 / base.num_layers
            dear.append(
                ModelDrafter(
                    MtpWriter(base), base.vocab_size, kept, cost, host_decides, noise, drawn, width, OTHER_DRAFTS[0]
                )
            )
        if "early-exit" in names:
            dear.append(EarlyExitDrafter(base, self._exit, kept, host_decides, noise, drawn, OTHER_DRAFTS[1]))
        return [*cheap, *dear][0] if alone else HybridDrafter(cheap, dear, nodes, chain)
