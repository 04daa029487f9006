"""What can draft: a table of sources, and the drafter of one or several of them."""

import dataclasses
import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from medusa.acceptance.logits import Warper
from medusa.base.model import BaseModel
from medusa.cache import Observer
from medusa.drafters.base import Drafter, PlainDrafter
from medusa.drafters.continuations import Confidence
from medusa.drafters.early_exit import EarlyExitDrafter, ExitLayer
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.hybrid import HybridDrafter
from medusa.drafters.model import WIDTH, ModelDrafter
from medusa.drafters.ngram import KEPT, NgramCache, NgramDrafter
from medusa.drafters.prompt_lookup import LOOKUP_GUESSES, SEARCH, PromptLookupDrafter
from medusa.drafters.sampled import SampledHeadsDrafter
from medusa.drafters.writers import MtpWriter, SmallModel, Writer
from medusa.heads import DraftHeads
from medusa.noise import DRAFT, OTHER_DRAFTS
from medusa.sampling import RULES, sources
from medusa.tree import Tree

logger = logging.getLogger(__name__)


@dataclass
class Parts:
    """What there is to draft with.

    Attributes:
        base: Prepared for decoding, with its own layer for drafts where that was loaded.
        heads: Its heads, frozen; None = there are none.
        draft_model: A smaller model of the same tokens, prepared for decoding; None = there is none.
        host_decides: Shapes cost nothing, and asking for a number does not stop a device.
        exit_layer: Where to leave the base early.
        ngrams: What followed short contexts in the completions of requests that name "ngram".
        confidence: How often what was looked up was right.
    """

    base: BaseModel
    heads: DraftHeads | None
    draft_model: BaseModel | None
    host_decides: bool
    exit_layer: ExitLayer
    ngrams: NgramCache = field(default_factory=NgramCache)
    confidence: Confidence = field(default_factory=lambda: Confidence(SEARCH))

    def with_heads(self, base: BaseModel, heads: DraftHeads | None) -> "Parts":
        """The same with other heads, and a base that gives what they read; what was learned is shared."""
        exit_layer = self.exit_layer if base is self.base else ExitLayer(base)
        return dataclasses.replace(self, base=base, heads=heads, exit_layer=exit_layer)


class Context(NamedTuple):
    """What the drafters of a tree share.

    Attributes:
        parts: What there is to draft with; all that the sources need is there.
        noise: Draws that drafts should follow, or are drawn as.
        drawn: Drafts are drawn.
        tree: A static tree of heads; None = the likeliest nodes.
    """

    parts: Parts
    noise: Warper
    drawn: bool
    tree: Tree | None = None

    @property
    def chain(self) -> bool:
        """Whether the base verifies chains only."""
        return self.parts.base.decoding == "chain"


class Need(NamedTuple):
    """What a source cannot do without.

    Attributes:
        there: Whether it is.
        what: In words, with what there is instead.
        remedy: What helps.
    """

    there: Callable[[Parts], bool]
    what: str
    remedy: str


class Source(NamedTuple):
    """Something that drafts.

    Attributes:
        make: Its drafter, from its own number of nodes, the root included.
        needs: None = nothing.
        costly: Drafts cost time, and heed the noise of draws.
        drawn_under: Acceptance rules under which its drafts are drawn, so that the text depends on them.
        observers: Layers of it that must see what the base commits.
    """

    make: Callable[[Context, int], Drafter]
    needs: Need | None = None
    costly: bool = True
    drawn_under: Container[str] = ()
    observers: Callable[[Parts], Sequence[Observer]] = lambda _: ()


def _prompt_lookup(context: Context, nodes: int) -> Drafter:
    parts = context.parts
    return PromptLookupDrafter(nodes, parts.host_decides, parts.confidence, context.chain)


def _ngram(context: Context, nodes: int) -> Drafter:
    return NgramDrafter(context.parts.ngrams, nodes, 1 if context.chain else KEPT)


def _heads(context: Context, nodes: int) -> Drafter:
    heads, base, tree = _heads_of(context, nodes)
    heat = 0.0 if context.drawn else context.noise.temperature  # beside draws, what is chosen may not know the noise
    return HeadsDrafter(heads, base, nodes, tree, context.parts.host_decides, temperature=heat)


def _heads_sampled(context: Context, nodes: int) -> Drafter:
    heads, base, tree = _heads_of(context, nodes)
    return SampledHeadsDrafter(heads, base, nodes, context.noise.temperature, tree)


def _heads_of(context: Context, nodes: int) -> tuple[DraftHeads, BaseModel, Tree | None]:
    """The heads, both ends of their vocabulary, and the tree that they have to fill."""
    heads, tree = context.parts.heads, context.tree
    assert heads is not None, "checked by the caller"
    if context.chain:
        tree = tree or Tree.chain(min(nodes - 1, heads.config.num_heads))
    return heads, context.parts.base, tree


def _draft_model(context: Context, nodes: int) -> Drafter:
    small, base = context.parts.draft_model, context.parts.base
    assert small is not None, "checked by the caller"
    return _written(SmallModel(small), small.weight_bytes / base.weight_bytes, context, nodes)


def _mtp(context: Context, nodes: int) -> Drafter:
    base = context.parts.base
    return _written(MtpWriter(base), 1 / base.num_layers, context, nodes, OTHER_DRAFTS[0])


def _written(writer: Writer, cost: float, context: Context, nodes: int, stream: int = DRAFT) -> Drafter:
    parts, noise, drawn, width = context.parts, context.noise, context.drawn, 1 if context.chain else WIDTH
    return ModelDrafter(writer, parts.base.vocab_size, nodes, cost, parts.host_decides, noise, drawn, width, stream)


def _early_exit(context: Context, nodes: int) -> Drafter:
    parts = context.parts
    parts.base.shallow(1)  # its layers can be found
    how = {"host_decides": parts.host_decides, "noise": context.noise, "drawn": context.drawn}
    return EarlyExitDrafter(parts.base, parts.exit_layer, nodes, **how, stream=OTHER_DRAFTS[1])


def _memory(parts: Parts) -> Sequence[Observer]:
    return parts.heads.observers if parts.heads is not None else []


def _layer(parts: Parts) -> Sequence[Observer]:
    return [parts.base.mtp] if parts.base.mtp is not None else []


HEADS = Need(lambda parts: parts.heads is not None, "heads and there are none", "load heads")
SMALL = Need(
    lambda parts: parts.draft_model is not None,
    "a draft model and there is none",
    "load one (draft_model=, --draft-model)",
)
LAYER = Need(
    lambda parts: parts.base.mtp is not None,
    "the base's multi-token-prediction layer and it was not loaded",
    "load it (mtp=True, --mtp)",
)
LAYERS = Need(
    lambda parts: parts.base.num_layers > 1,
    "a part of the base's layers and that has one layer and no early exit",
    "take another base",
)
SOURCES = {
    "prompt-lookup": Source(_prompt_lookup, costly=False),
    "ngram": Source(_ngram, costly=False),
    "heads": Source(_heads, HEADS, observers=_memory),
    "draft-model": Source(_draft_model, SMALL, drawn_under=("speculative",)),
    "mtp": Source(_mtp, LAYER, drawn_under=("speculative",), observers=_layer),
    "early-exit": Source(_early_exit, LAYERS, drawn_under=("speculative",)),
    "heads-sampled": Source(_heads_sampled, HEADS, drawn_under=RULES, observers=_memory),
}
"""By the names that ``medusa.sampling`` lists."""


def missing(name: str, parts: Parts) -> Need | None:
    """What the sources of a name need and is not there."""
    needs = [SOURCES[source].needs for source in sources(name)]
    return next((need for need in needs if need is not None and not need.there(parts)), None)


def is_costly(name: str) -> bool:
    """Whether drafts of this name cost time."""
    return any(SOURCES[source].costly for source in sources(name))


def is_drawn(name: str, rule: str) -> bool:
    """Whether drafts of this name are drawn under a rule, and the text depends on them."""
    return any(rule in SOURCES[source].drawn_under for source in sources(name))


def observers(name: str, parts: Parts) -> list[Observer]:
    """Layers among the sources of a name that must see what the base commits."""
    return [one for source in sources(name) for one in SOURCES[source].observers(parts)]


def build(name: str, nodes: int, context: Context) -> Drafter:
    """The drafter of a name.

    Args:
        name: One that ``sources`` knows.
        nodes: N, the root included.
        context: What its sources share.

    Raises:
        ValueError: The tree, or so few nodes, cannot be drafted.
    """
    base, tree = context.parts.base, context.tree
    if base.decoding == "plain":
        logger.warning("drafter (%s, %d nodes) is not used: base (%s) only decodes plainly", name, nodes, base.name)
        return PlainDrafter()
    if context.chain and tree is not None and tree.depth + 1 < tree.nodes:
        raise ValueError(
            f"tree ({tree.nodes} nodes, depth {tree.depth}) branches and the base ({base.name}) verifies"
            f" chains only; give Tree.chain({tree.depth})"
        )
    names = sorted(sources(name), key=list(SOURCES).index)
    shares = split(names, nodes, side_by_side=not context.parts.host_decides and not context.chain)
    made = {source: SOURCES[source].make(context, share) for source, share in shares.items()}
    if len(made) == 1:
        return next(iter(made.values()))
    cheap, dear = ([made[source] for source in made if SOURCES[source].costly is costly] for costly in (False, True))
    return HybridDrafter(cheap, dear, nodes, context.chain)


def split(names: Sequence[str], nodes: int, side_by_side: bool) -> dict[str, int]:
    """How many nodes each source drafts, the root included.

    Args:
        names: The sources.
        nodes: N of the whole tree.
        side_by_side: All that is drafted is verified, so each source has its part, and costly ones come first where
            there are not enough. Otherwise the best nodes of all are, or one chain, and each drafts a whole tree.
    """
    if side_by_side:
        first = set(sorted(names, key=lambda name: not SOURCES[name].costly)[: nodes - 1])
        names = [name for name in names if name in first]
    if len(names) == 1:
        return {names[0]: nodes}
    free = [name for name in names if not SOURCES[name].costly]
    guesses, most = min(nodes - 1, LOOKUP_GUESSES), nodes
    if side_by_side:
        guesses = max(1, min(nodes // 2, LOOKUP_GUESSES) // (len(names) - 1))
        most = max(2, (nodes - guesses * len(free)) // max(1, len(names) - len(free)))
    return {name: guesses + 1 if name in free else most for name in names}
