"""The drafter of a request, from its name, and its tree size where that is left open."""

import logging
from collections import OrderedDict

from medusa.acceptance import BuiltRule, build_rule
from medusa.base.model import BaseModel
from medusa.budget.auto import AutoNodes
from medusa.drafters.base import Drafter, PlainDrafter
from medusa.drafters.confidence import Confidence
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.hybrid import HybridDrafter
from medusa.drafters.ngram import KEPT, ORDERS, NgramCache, NgramDrafter
from medusa.drafters.prompt_lookup import BELIEFS, LOOKUP_GUESSES, PLACES, PromptLookupDrafter
from medusa.drafters.sampled import SampledHeadsDrafter
from medusa.engine.graph import StepGraphs
from medusa.engine.output import Output
from medusa.engine.steps import EagerSteps, StartSteps
from medusa.heads import DraftHeads
from medusa.sampling import SamplingParams, Speculation, sources
from medusa.tree import Tree

logger = logging.getLogger(__name__)

DRAWN = 8
"""Nodes of drawn drafts where none are given: text depends on them, and a seed must give the same text again."""
GUESSES = 6
"""Nodes for a single sequence on a CPU where all drafters cost nothing: without a guess a step is a plain one."""
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
        ngrams: What followed short contexts in the completions of requests that name "ngram".
    """

    def __init__(self, base: BaseModel, heads: DraftHeads | None, graphs: StepGraphs | None) -> None:
        self._base, self._heads, self._graphs = base, heads, graphs
        self.start: StartSteps = EagerSteps if graphs is None else graphs.steps
        self.ngrams = NgramCache()
        self._plain, self._looked_up = PlainDrafter(), Confidence(BELIEFS)
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
        takes_tree, names = name in (None, "heads", "heads-sampled"), sources(name) if name else ()
        if tree is not None and (self._heads is None or nodes is not None or not takes_tree):
            raise ValueError(
                "tree needs heads and takes the place of nodes and drafter; give one of them, on a model with heads"
            )
        if self._heads is None and not {"heads", "heads-sampled"}.isdisjoint(names):
            raise ValueError(f"drafter ({name!r}) needs heads and there are none; load heads, or choose prompt-lookup")
        if nodes is not None or tree is not None:
            self._given(speculation, temperature)

    def choose(self, speculation: Speculation, temperature: float, batch: int, rule: BuiltRule) -> Drafter:
        """The drafter of a checked request.

        Args:
            speculation: What it asks for.
            temperature: Of its sampling: drawn drafts are drawn at it, and others heed its noise.
            batch: Sequences that share a pass.
            rule: Of the request.
        """
        name = speculation.drafter
        if name is not None and not isinstance(name, str):
            drafter: Drafter = name
            return drafter
        if rule.work.startswith("typical") and name != "heads-sampled":  # what is likely passes, not what is drawn
            temperature = 0.0
        drafter_given = self._given(speculation, temperature)
        if drafter_given is not None:
            return drafter_given
        name = name or "hybrid"

        def build(nodes: int) -> Drafter:
            return self._sized(name, nodes, None, temperature)

        if name == "heads-sampled":
            return build(DRAWN)
        if self._alone_and_free(name, batch):
            return build(GUESSES)
        if self._on_host:
            return self._auto.at_each_step(name, batch, rule, build)
        return self._auto.for_completion(name, batch, rule, build)

    def observe(
        self, drafter: Drafter, speculation: Speculation, rule: BuiltRule, batch: int, prompt: list[int], output: Output
    ) -> None:
        """Learn from a completion that is over."""
        self._auto.observe(drafter, rule, batch, output)
        name = speculation.drafter
        if isinstance(name, str) and "ngram" in sources(name):
            self.ngrams.learn([*prompt[-max(ORDERS) :], *output.tokens])

    def explain(self, name: str | None) -> str:
        """What ``nodes=None`` means for one prompt and why, in one line."""
        drafts = self._base.decoding != "plain" and (name is not None or self._heads is not None)
        if not drafts:
            return "nodes auto: 1, plain decoding"
        speculation = Speculation(drafter=name)
        self.check(speculation, 1.0)
        if name == "heads-sampled":
            return f"nodes auto: {DRAWN} for {name}, so that a seed gives the same text again"
        if self._alone_and_free(name or "hybrid", 1):
            return f"nodes auto: at most {GUESSES} for {name}, fewer where guesses are unlikely"
        self.choose(speculation, 1.0, 1, build_rule(SamplingParams()))
        return self._auto.reason

    def _alone_and_free(self, name: str, batch: int) -> bool:
        """Whether drafts cost nothing to make and say themselves how many of their nodes are worth a row."""
        return self._on_host and batch == 1 and "heads" not in sources(name)

    @property
    def _on_host(self) -> bool:
        """Whether shapes cost nothing, and asking for a number does not stop a device."""
        return self._graphs is None and self._base.device.type == "cpu"

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
        key = (name, nodes, tree, temperature if not {"heads", "heads-sampled"}.isdisjoint(sources(name)) else 0.0)
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
        host_decides, chain, names = self._on_host, self._base.decoding == "chain", sources(name)
        if chain and self._heads is not None:
            tree = tree or Tree.chain(min(nodes - 1, self._heads.config.num_heads))
        if name == "heads-sampled":
            assert self._heads is not None, "checked by the caller"
            return SampledHeadsDrafter(self._heads, self._base, nodes, temperature, tree)
        if not host_decides and nodes == 2 and "heads" in names:
            names = ("heads",)
        # On a CPU the best nodes of all stay; where shapes are fixed, each has its part of them.
        alone = len(names) == 1
        share = nodes if alone or host_decides else 1 + min(nodes // 2, LOOKUP_GUESSES) // (len(names) - 1)
        cheap: list[Drafter] = []
        if "prompt-lookup" in names:
            most = share if alone else min(share, LOOKUP_GUESSES + 1)
            cheap.append(PromptLookupDrafter(most, 2, host_decides, self._looked_up, 1 if chain else PLACES))
        if "ngram" in names:
            cheap.append(NgramDrafter(self.ngrams, share, 1 if chain else KEPT))
        if "heads" not in names:
            return cheap[0] if alone else HybridDrafter(cheap, None, nodes, chain)
        assert self._heads is not None, "checked by the caller"
        kept = nodes if alone or host_decides else nodes - (share - 1) * len(cheap)
        heads = HeadsDrafter(self._heads, self._base, kept, tree, host_decides, temperature=temperature)
        return heads if alone else HybridDrafter(cheap, heads, nodes, chain)
