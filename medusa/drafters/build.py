"""A table of draft sources, and the drafter of one or several of them."""

import dataclasses
import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from medusa.acceptance.logits import Warper
from medusa.base.model import BaseModel
from medusa.cache import Observer
from medusa.drafters.base import Drafter, PlainDrafter
from medusa.drafters.continuations import SEARCH, Confidence
from medusa.drafters.early_exit import EarlyExitDrafter, ExitLayer
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.hybrid import HybridDrafter
from medusa.drafters.model import WIDTH, ModelDrafter
from medusa.drafters.ngram import NgramCache, NgramDrafter
from medusa.drafters.prompt_lookup import LOOKUP_GUESSES, PromptLookupDrafter
from medusa.drafters.sampled import SampledHeadsDrafter
from medusa.drafters.writers import MtpWriter, SmallModel, Writer
from medusa.heads import DraftHeads
from medusa.noise import DRAFT, OTHER_DRAFTS
from medusa.sampling import RULES, sources
from medusa.tree import Tree

logger = logging.getLogger(__name__)


@dataclass
class Parts:
    """The parts that are available for drafting.

    Attributes:
        base: The base, prepared for decoding, with its multi-token-prediction layer if that was loaded.
        heads: Its frozen heads; None = there are none.
        draft_model: A smaller model with the same tokens, prepared for decoding; None = there is none.
        host_decides: Whether the host may choose shapes in each step (on a CPU, where shapes and reading are free).
        exit_layer: Chooses the exit layer of early exit.
        ngrams: The completions that "ngram" drafts from.
        confidence: Shares of right guesses of prompt lookup.
    """

    base: BaseModel
    heads: DraftHeads | None
    draft_model: BaseModel | None
    host_decides: bool
    exit_layer: ExitLayer
    ngrams: NgramCache = field(default_factory=NgramCache)
    confidence: Confidence = field(default_factory=lambda: Confidence(SEARCH))

    def with_heads(self, base: BaseModel, heads: DraftHeads | None) -> "Parts":
        """The same with other heads, and a base that taps their layers; learned state is shared."""
        exit_layer = self.exit_layer if base is self.base else ExitLayer(base)
        return dataclasses.replace(self, base=base, heads=heads, exit_layer=exit_layer)


class Context(NamedTuple):
    """Common settings of the drafters of a tree.

    Attributes:
        parts: The available parts, including all that the sources need.
        noise: Sampling settings whose noise drafts follow, or with which they are drawn.
        drawn: Whether drafts are drawn.
        tree: A static tree for heads; None = the most likely nodes.
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
    """A part that a source needs.

    Attributes:
        there: Whether the part is available.
        what: The part in words, for errors.
        remedy: How to get it.
    """

    there: Callable[[Parts], bool]
    what: str
    remedy: str


class Source(NamedTuple):
    """A source of drafts.

    Attributes:
        make: Makes its drafter for a number of nodes, the root included.
        needs: The part that it needs; None = none.
        costly: Whether drafts cost time; such drafts follow the noise of the base's draws.
        drawn_under: Acceptance rules under which its drafts are drawn, so that the text depends on them.
        observers: Its layers that read the hidden states of committed tokens.
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
    return NgramDrafter(context.parts.ngrams, nodes, context.chain)


def _heads(context: Context, nodes: int) -> Drafter:
    heads, base, tree = _heads_of(context, nodes)
    heat = 0.0 if context.drawn else context.noise.temperature  # chosen drafts beside drawn ones must not use the noise
    return HeadsDrafter(heads, base, nodes, tree, context.parts.host_decides, temperature=heat)


def _heads_sampled(context: Context, nodes: int) -> Drafter:
    heads, base, tree = _heads_of(context, nodes)
    return SampledHeadsDrafter(heads, base, nodes, context.noise.temperature, tree)


def _heads_of(context: Context, nodes: int) -> tuple[DraftHeads, BaseModel, Tree | None]:
    """The heads, the base's embeddings and output layer, and the tree to fill."""
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
    parts.base.shallow(1)  # the layers of the base can be found
    how = {"host_decides": parts.host_decides, "noise": context.noise, "drawn": context.drawn}
    return EarlyExitDrafter(parts.exit_layer, nodes, **how, stream=OTHER_DRAFTS[1])


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
"""Sources by name, see ``medusa.sampling``."""


def missing(name: str, parts: Parts) -> Need | None:
    """The first missing part that the sources of a name need."""
    needs = [SOURCES[source].needs for source in sources(name)]
    return next((need for need in needs if need is not None and not need.there(parts)), None)


def is_costly(name: str) -> bool:
    """Whether drafts of this name cost time."""
    return any(SOURCES[source].costly for source in sources(name))


def is_drawn(name: str, rule: str) -> bool:
    """Whether drafts of this name are drawn under a rule, so that the text depends on them."""
    return any(rule in SOURCES[source].drawn_under for source in sources(name))


def observers(name: str, parts: Parts) -> list[Observer]:
    """Layers of the sources of a name that read the hidden states of committed tokens."""
    return [one for source in sources(name) for one in SOURCES[source].observers(parts)]


def build(name: str, nodes: int, context: Context) -> Drafter:
    """Build the drafter of a name.

    Args:
        name: A name that ``sources`` accepts.
        nodes: N, the root included.
        context: Common settings of its sources.

    Raises:
        ValueError: The tree cannot be drafted, or ``nodes`` is too small.
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
    """Number of nodes of each source, the root included.

    Args:
        names: The sources.
        nodes: N of the whole tree.
        side_by_side: All drafted nodes are verified, so each source gets a part; if there are too few, costly sources
            come first. Otherwise the best nodes of all, or one chain, are verified, and each source drafts N nodes.
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
