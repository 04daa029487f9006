"""The drafter of a request, from its name, and its tree size where that is left open."""

import logging
from collections import OrderedDict

from medusa.acceptance import BuiltRule, build_rule
from medusa.base.model import BaseModel
from medusa.budget.auto import AutoNodes
from medusa.drafters.base import Drafter, PlainDrafter
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.hybrid import HybridDrafter
from medusa.drafters.prompt_lookup import LOOKUP_GUESSES, PromptLookupDrafter
from medusa.drafters.sampled import SampledHeadsDrafter
from medusa.engine.graph import StepGraphs
from medusa.engine.output import Output
from medusa.engine.steps import EagerSteps, StartSteps
from medusa.heads import DraftHeads
from medusa.sampling import SamplingParams, Speculation
from medusa.tree import Tree

logger = logging.getLogger(__name__)

SURE_MATCH = 4
"""Tokens that must agree for a hybrid draft on a CPU to leave out the heads."""
DRAWN = 8
"""Nodes of drawn drafts where none are given: text depends on them, and a seed must give the same text again."""
KEPT_DRAFTERS = 64
"""Drafters of different names, sizes, trees and temperatures; the one that was not used for longest goes."""


class Drafters:
    """The drafters of one base with its heads.

    Args:
        base: Prepared for decoding.
        heads: Its heads, frozen; None = there are none.
        graphs: Runs the steps as CUDA graphs, and shapes are fixed; None = eagerly.

    Attributes:
        start: Runs the steps.
    """

    def __init__(self, base: BaseModel, heads: DraftHeads | None, graphs: StepGraphs | None) -> None:
        self._base, self._heads, self._graphs = base, heads, graphs
        self.start: StartSteps = EagerSteps if graphs is None else graphs.steps
        self._plain = PlainDrafter()
        self._auto = AutoNodes(base.device.type)
        self._kept: OrderedDict[tuple[str, int, Tree | None, float], Drafter] = OrderedDict()

    def check(self, speculation: Speculation, temperature: float) -> None:
        """Refuse what this model cannot draft.

        Raises:
            ValueError: A drafter that needs heads where there are none, or a tree that does not fit.
        """
        name, nodes, tree = speculation.drafter, speculation.nodes, speculation.tree
        if name is not None and not isinstance(name, str):
            return
        takes_tree = name in (None, "heads", "heads-sampled")
        if tree is not None and (self._heads is None or nodes is not None or not takes_tree):
            raise ValueError(
                "tree needs heads and takes the place of nodes and drafter; give one of them, on a model with heads"
            )
        if self._heads is None and name not in (None, "prompt-lookup"):
            raise ValueError(f"drafter ({name!r}) needs heads and there are none; load heads, or choose prompt-lookup")
        if nodes is not None or tree is not None:
            self._given(speculation, temperature)

    def choose(self, speculation: Speculation, temperature: float, batch: int, rule: BuiltRule) -> Drafter:
        """The drafter of a checked request.

        Args:
            speculation: What it asks for.
            temperature: Of its sampling: drawn drafts are drawn at it.
            batch: Sequences that share a pass.
            rule: Of the request.
        """
        name = speculation.drafter
        if name is not None and not isinstance(name, str):
            drafter: Drafter = name
            return drafter
        drafter_given = self._given(speculation, temperature)
        if drafter_given is not None:
            return drafter_given
        name = name or "hybrid"

        def build(nodes: int) -> Drafter:
            return self._sized(name, nodes, None, temperature)

        if name == "heads-sampled":
            return build(DRAWN)
        if self._graphs is None and self._base.device.type == "cpu":
            return self._auto.at_each_step(name, batch, rule, build)
        return self._auto.for_completion(name, batch, rule, build)

    def observe(self, drafter: Drafter, rule: BuiltRule, batch: int, output: Output) -> None:
        """Learn from a completion that is over."""
        self._auto.observe(drafter, rule, batch, output)

    def explain(self, name: str | None) -> str:
        """What ``nodes=None`` means for one prompt and why, in one line."""
        drafts = self._base.decoding != "plain" and (name is not None or self._heads is not None)
        if not drafts:
            return "nodes auto: 1, plain decoding"
        speculation = Speculation(drafter=name)
        self.check(speculation, 1.0)
        if name == "heads-sampled":
            return f"nodes auto: {DRAWN} for {name}, so that a seed gives the same text again"
        self.choose(speculation, 1.0, 1, build_rule(SamplingParams()))
        return self._auto.reason

    def _given(self, speculation: Speculation, temperature: float) -> Drafter | None:
        """The drafter where its size follows from the request alone."""
        name, nodes, tree = speculation.drafter, speculation.nodes, speculation.tree
        if nodes == 1 or (name is None and self._heads is None):
            return self._plain
        if nodes is None and tree is None and self._base.decoding != "plain":
            return None
        return self._sized(name or ("heads" if tree else "hybrid"), nodes or 2, tree, temperature)

    def _sized(self, name: str, nodes: int, tree: Tree | None, temperature: float) -> Drafter:
        if nodes == 1 and tree is None and self._base.decoding != "plain":
            return self._plain
        key = (name, nodes, tree, temperature if name == "heads-sampled" else 0.0)
        if key not in self._kept:
            self._kept[key] = self._new(*key)
        self._kept.move_to_end(key)
        while len(self._kept) > KEPT_DRAFTERS:
            self._kept.popitem(last=False)
        return self._kept[key]

    def _new(self, name: str, nodes: int, tree: Tree | None, temperature: float) -> Drafter:
        if self._base.decoding == "chain" and tree is not None and tree.depth + 1 < tree.nodes:
            raise ValueError(
                f"tree ({tree.nodes} nodes, depth {tree.depth}) branches and the base ({self._base.name}) verifies"
                f" chains only; give Tree.chain({tree.depth})"
            )
        if self._base.decoding == "plain":
            plain = "drafter (%s, %d nodes) is left out: base (%s) decodes plainly"
            logger.warning(plain, name, nodes, self._base.name)
            return PlainDrafter()
        host_decides = self._graphs is None
        if name == "prompt-lookup":
            return PromptLookupDrafter(nodes, host_decides=host_decides)
        assert self._heads is not None, "checked by the caller"
        if name == "heads-sampled":
            if self._base.decoding == "chain":
                tree = tree or Tree.chain(min(nodes - 1, self._heads.config.num_heads))
            return SampledHeadsDrafter(self._heads, self._base, nodes, temperature, tree)
        guesses = min(nodes // 2, LOOKUP_GUESSES)
        sure = PromptLookupDrafter(min(nodes, LOOKUP_GUESSES + 1), min_match=SURE_MATCH) if host_decides else None
        if self._base.decoding == "chain":
            chain = tree or Tree.chain(min(nodes - 1, self._heads.config.num_heads))
            heads = HeadsDrafter(self._heads, self._base, nodes, chain)
            return heads if name == "heads" else HybridDrafter(heads, PlainDrafter(), shortcut=sure)
        if name == "heads" or nodes == 2:
            return HeadsDrafter(self._heads, self._base, nodes, tree, host_decides)
        heads = HeadsDrafter(self._heads, self._base, nodes - guesses, host_decides=host_decides)
        return HybridDrafter(heads, PromptLookupDrafter(guesses + 1, host_decides=host_decides), shortcut=sure)
