"""How long steps take on this machine: measured with the loaded base, and kept in a file for the next start."""

import hashlib
import json
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import torch
import transformers

from medusa.acceptance import Rule, greedy
from medusa.base.model import BaseModel
from medusa.budget.cost import STEEP, StepCosts
from medusa.clock import cores
from medusa.drafters import Drafter, HeadsDrafter
from medusa.engine.steps import EagerSteps, StartSteps
from medusa.files import cache_directory, replace_file
from medusa.heads import DraftHeads
from medusa.state import DecodeState
from medusa.tree import Draft

logger = logging.getLogger(__name__)

GRID = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Tree sizes that are measured where the host decides."""
FIXED_GRID = (1, 4, 8, 16, 32, 64)
"""And where shapes are fixed; fewer than recordings that a cache keeps."""
CONTEXT = 256
"""Cached tokens of each sequence, or half of the base's context where that is less."""
SECONDS = 1.0
"""Rounds are repeated until so much time is over, ``ROUNDS`` times at most; their medians count."""
ROUNDS = 9
STEPS = 3
"""Steps per sample, after one that warms the caches; fewer where they take more than ``SLOW`` together."""
SLOW = 0.1
"""Seconds after which enough was seen of what takes so long."""
MOST_DRAFTED = 32
"""Nodes of the draft whose levels are timed."""
BUSY = 1.5
"""Load average per core from which costs are not kept; measuring itself brings up to 1."""
FORMAT = 1
"""Of the files; changes with what is measured and how."""

_measuring = threading.Lock()


def facts(base: BaseModel, heads: DraftHeads | None, batch: int, how: str, work: str) -> dict[str, object]:
    """Everything that costs depend on, as far as it can be known.

    Args:
        base: Prepared for decoding.
        heads: Its heads.
        batch: Sequences B.
        how: Who drafts, and whether steps are recorded.
        work: What the rule computes at every node.
    """
    cuda = base.device.type == "cuda"
    return {
        "format": FORMAT,
        "base": base.config.to_json_string(use_diff=False),
        "dtype": str(base.dtype),
        "device": torch.cuda.get_device_name(base.device) if cuda else f"{platform.node()} {platform.processor()}",
        "threads": 0 if cuda else torch.get_num_threads(),
        "compiled": base.compiled,
        "int8": base.int8,
        "layers": sorted({type(module).__name__ for module in base.model.modules()}),
        "devices": sorted({str(parameter.device) for parameter in base.model.parameters()}),
        "attention": base.attention.name,
        "heads": asdict(replace(heads.config, base="", base_adapter="")) if heads is not None else None,
        "versions": [torch.__version__, transformers.__version__],
        "batch": batch,
        "how": how,
        "work": work,
    }


def known_costs(known_by: Mapping[str, object], measure: Callable[[], StepCosts]) -> StepCosts:
    """Costs that an earlier start measured under the same facts, or those measured now.

    One thread measures at a time: others would slow it down, and find what it has found.

    Those that were measured on a busy machine serve this process alone; others are kept under ``XDG_CACHE_HOME``,
    ~/.cache where it is not set. A file that cannot be read or written is as good as none: the log says so, and nothing
    fails.

    Args:
        known_by: See ``facts``.
        measure: Measures them.
    """
    text = json.dumps(known_by, sort_keys=True)
    name = f"steps-{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"
    path, batch = cache_directory() / name, known_by.get("batch")
    with _measuring:
        costs = _read(path)
        if costs is not None:
            logger.info("batch of %s: %s (measured before, %s)", batch, costs, path)
            return costs
        logger.info("batch of %s: measuring what steps cost here, once for this machine", batch)
        costs = measure()
        logger.info("batch of %s: %s (measured now)", batch, costs)
        if busy():
            logger.warning("step costs are measured again at the next start: this machine is busy with other work")
        else:
            _write(path, costs)
    return costs


def busy() -> bool:
    """Whether much more wants to run than there are cores: what is measured now says little of other hours."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > BUSY * cores()


def measure_passes(base: BaseModel, rule: Rule = greedy) -> StepCosts:
    """Costs of one sequence where the host decides: steps of drafts that cost nothing.

    Args:
        base: Prepared for decoding.
        rule: Decides in every step: a small rule is cheap, and one that sorts the vocabulary at every node is not.
    """
    rig = _Rig(base, 1, EagerSteps, rule)
    return StepCosts(*rig.sweep(GRID, rig.given))


def with_drafting(passes: StepCosts, base: BaseModel, heads: DraftHeads) -> StepCosts:
    """The same costs, and those of drafting with heads before the passes.

    Args:
        passes: See ``measure_passes``.
        base: Prepared for decoding.
        heads: Its heads, frozen.
    """
    state, depth = _state(base, 1, _context(base)), heads.config.num_heads
    shallow, deep = (_drafting(heads, base, state, levels) for levels in (1, depth))
    level = max(0.0, deep - shallow) / (depth - 1) if depth > 1 else shallow
    return replace(passes, begin=shallow, level=level)


def measure_fixed(
    base: BaseModel, batch: int, start: StartSteps, drafter: Callable[[int], Drafter], rule: Rule = greedy
) -> StepCosts:
    """Costs where shapes are fixed: whole steps, drafting included.

    Args:
        base: Prepared for decoding.
        batch: Sequences B.
        start: What runs the steps, see ``decode``.
        drafter: The drafter of a tree size; 1 = plain decoding.
        rule: Decides in every step.
    """
    return StepCosts(*_Rig(base, batch, start, rule).sweep(FIXED_GRID, drafter))


class _Rig:
    """Sequences of zeros in a scratch cache, stepped from the same place again and again: values decide no time."""

    def __init__(self, base: BaseModel, batch: int, start: StartSteps, rule: Rule) -> None:
        self._base, self._start, self._rule = base, start, rule
        self._context = _context(base)
        # Steps emit few tokens and start anew after a few; graphs make room for two steps at a time.
        self._cache = base.new_cache(batch, self._context + 8 * max(GRID))
        self.state = _state(base, batch, self._cache.capacity)

    def given(self, nodes: int) -> Drafter:
        """Proposes always the same binary tree."""
        return _Given(nodes, self.state.roots)

    def sweep(
        self, grid: Sequence[int], drafter: Callable[[int], Drafter]
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Tree sizes and the seconds of their steps, measured alternately: a slow moment hits all sizes."""
        drafters, times = {}, {}
        for nodes in grid:
            drafters[nodes] = drafter(nodes)
            try:
                times[nodes] = [self._sample(drafters[nodes])]
            except torch.OutOfMemoryError:
                if nodes == 1:
                    raise
                del drafters[nodes]  # what does not fit is no choice
                break
            most = STEEP * times[1][0]
            if times[nodes][0] > most and self._sample(drafters[nodes]) > most:  # twice: not by a moment of other work
                break
        if times[1][0] < SLOW:  # otherwise one round must do
            end = time.perf_counter() + SECONDS
            for _ in range(ROUNDS):
                for nodes, candidate in drafters.items():
                    times[nodes].append(self._sample(candidate))
                if time.perf_counter() > end:
                    break
        # The first samples have compiled and allocated what there is.
        return tuple(times), tuple(median(seconds[1:] or seconds) for seconds in times.values())

    def _sample(self, drafter: Drafter) -> float:
        """Median seconds of a step."""
        self._cache.cut([self._context] * self._cache.slots)
        steps = self._start(self._base, self._cache, drafter, self._rule, self.state)
        steps.next()
        return _median_seconds(steps.next, STEPS)


def _context(base: BaseModel) -> int:
    return min(CONTEXT, base.context_length // 2)


def _state(base: BaseModel, batch: int, capacity: int) -> DecodeState:
    """Sequences of zeros behind ``_context`` tokens, with room for ``capacity`` cached ones."""
    zeros_B = torch.zeros(batch, dtype=torch.int64, device=base.device)
    history_BT = zeros_B[:, None].repeat(1, capacity + 1)
    hidden_BD = torch.zeros(batch, base.feature_size, dtype=base.dtype, device=base.device)
    return DecodeState(zeros_B, hidden_BD, zeros_B == 0, history_BT, zeros_B + _context(base), zeros_B, zeros_B)


class _Levels:
    """``Sizes`` that end a tree after so many levels and keep all of it."""

    def __init__(self, levels: int) -> None:
        self._levels = levels

    def parents(self, level: int, scores_BC: torch.Tensor, beam: int) -> int:
        """See ``Sizes``; it looks at the scores, as every choice does."""
        return beam if level + 1 < self._levels and float(scores_BC.max()) <= 0.0 else 0

    def nodes(self, scores_BM: torch.Tensor, most: int) -> int:
        """See ``Sizes``."""
        return most


class _Given:
    """Proposes one draft that was made before: a binary tree of the roots' tokens."""

    recordable = False

    def __init__(self, nodes: int, roots_B: torch.Tensor) -> None:
        self.nodes = nodes
        parents_N = (torch.arange(nodes) - 1).clamp(min=0) // 2
        tokens_BN = roots_B[:, None].repeat(1, nodes)
        self._draft = Draft.of(tokens_BN, parents_N.expand(len(roots_B), -1), nodes.bit_length() - 1)

    def propose(self, state: DecodeState) -> Draft:
        """The same draft."""
        return self._draft


def _drafting(heads: DraftHeads, base: BaseModel, state: DecodeState, levels: int) -> float:
    """Median seconds of drafting so many levels, the choice of nodes included."""
    drafter = HeadsDrafter(heads, base, MOST_DRAFTED, sizes=_Levels(levels))
    with torch.inference_mode():
        drafter.propose(state)
        return _median_seconds(lambda: drafter.propose(state), STEPS * ROUNDS)


def _median_seconds(action: Callable[[], object], most: int) -> float:
    """Of ``most`` times, or of fewer where it takes long."""
    times: list[float] = []
    while len(times) < most and sum(times) < SLOW:
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return median(times)


def _read(path: Path) -> StepCosts | None:
    try:
        return StepCosts.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("step costs (%s) are measured again: %s", path, error)
        return None


def _write(path: Path, costs: StepCosts) -> None:
    """At once or not at all: another process may read or write the same file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda beside: beside.write_text(costs.to_json() + "\n", encoding="utf-8"))
    except OSError as error:
        logger.warning("step costs are not kept for the next start: %s", error)
