"""Drafting from an n-gram cache: the tokens that followed short contexts in earlier texts.

Prompt lookup searches one text. This cache has learned from many: completions of requests that use it, or a corpus.
(It is like the lookahead cache of Lookahead decoding, Fu et al. 2024, and that of llama.cpp.)
"""

import heapq
import math
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from threading import Lock

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from medusa.cache import Cached
from medusa.drafters.base import Drafter
from medusa.drafters.merge import Node, build, node_floor
from medusa.files import replace_file
from medusa.state import DecodeState
from medusa.tree import Draft

ORDERS = (4, 3, 2)
"""Lengths of contexts in tokens, the longest first."""
CAPACITY = 200_000
"""Most contexts of a cache, about 85 MB."""
KEPT = 4
"""Most continuations of a context; the most frequent are kept."""
DOUBT = 1.0
"""Number of observations of unseen continuations, so that one seen once has probability 1/2."""
MEMORY = 64
"""Approximate number of guesses over which their accuracy is averaged."""
TRUST = 8.0
"""Prior count of right and of expected guesses."""
FORMAT = "medusa-ngrams"

Context = tuple[int, ...]


class NgramCache:
    """Counts of tokens that followed contexts; the least recently used context is dropped first.

    Requests of one model that name the drafter share it, so one request learns from the texts of others. Threads may
    share it too.

    Args:
        capacity: Most contexts.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"capacity ({capacity}) of the n-gram cache must be at least 1 context; raise it")
        self._capacity = capacity
        self._counts: OrderedDict[Context, Counter[int]] = OrderedDict()
        self._right = self._expected = TRUST
        self._lock = Lock()

    def __len__(self) -> int:
        """Number of contexts."""
        return len(self._counts)

    def learn(self, tokens: Sequence[int]) -> None:
        """Count what follows each context of a text."""
        with self._lock:
            for end in range(min(ORDERS), len(tokens)):
                for order in ORDERS:
                    if order <= end:
                        self._count(tuple(tokens[end - order : end]), tokens[end])
            while len(self._counts) > self._capacity:
                self._counts.popitem(last=False)

    def _count(self, context: Context, token: int) -> None:
        counts = self._counts.setdefault(context, Counter())
        counts[token] += 1
        if len(counts) > KEPT:
            rarest = min((other for other in counts if other != token), key=counts.__getitem__)
            del counts[rarest]
        self._counts.move_to_end(context)

    def following(self, context: Context) -> Iterator[tuple[int, float]]:
        """Tokens that followed the longest known end of a context, with the log-probability of each.

        That is its share of the continuations, times the ratio of right to expected guesses of late: other texts may
        say little about this one.
        """
        trust = min(0.0, math.log(self._right / self._expected))
        for order in ORDERS:
            with self._lock:
                counts = dict(self._counts.get(context[-order:]) or {}) if order <= len(context) else {}
            if counts:
                total = math.log(sum(counts.values()) + DOUBT)
                for token, times in counts.items():
                    yield token, math.log(times) - total + trust
                return

    def judge(self, score: float, right: bool) -> None:
        """Observe whether a guess with this log-probability was right."""
        keep, claimed = 1 - 1 / MEMORY, math.exp(score) * self._expected / min(self._right, self._expected)
        self._right, self._expected = keep * self._right + right + 0.01, keep * self._expected + claimed + 0.01

    def tree(self, context: Sequence[int], nodes: int, branches: int = KEPT) -> list[Node]:
        """The most likely ``nodes`` nodes below the context's last token, which is the root."""
        turn, tree = count(), [Node(context[-1], 0, 0.0, 0)]
        heap: list[tuple[float, int, int, int, Context]] = []

        def offer(index: int, above: Context) -> None:
            for token, score in sorted(self.following(above), key=lambda pair: -pair[1])[:branches]:
                heapq.heappush(heap, (-tree[index].score - score, next(turn), index, token, above))

        offer(0, tuple(context[-max(ORDERS) :]))
        while heap and len(tree) < nodes:
            cost, _, parent, token, above = heapq.heappop(heap)
            if -cost < node_floor(nodes):
                break
            tree.append(Node(token, parent, -cost, tree[parent].depth + 1))
            offer(len(tree) - 1, (*above, token)[-max(ORDERS) :])
        return tree

    def save(self, path: str | Path) -> None:
        """Write the cache as one safetensors file, atomically."""
        width = max(ORDERS)
        with self._lock:
            rows = [[-1] * (width - len(context)) + list(context) for context in self._counts]
            pairs = [[*counts.most_common(KEPT), *[(-1, 0)] * KEPT][:KEPT] for counts in self._counts.values()]
        tensors = {
            "contexts": torch.tensor(rows, dtype=torch.int32).view(-1, width),
            "following": torch.tensor(pairs, dtype=torch.int32).view(-1, KEPT, 2),
        }
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda beside: save_file(tensors, beside, metadata={"format": FORMAT}))

    @classmethod
    def load(cls, path: str | Path, capacity: int = CAPACITY, vocab_size: int | None = None) -> "NgramCache":
        """Read a file that ``save`` wrote; if it exceeds the capacity, the latest contexts are kept.

        Args:
            path: The file.
            capacity: Most contexts to keep.
            vocab_size: V of the base that verifies; None = not checked.

        Raises:
            ValueError: The file is not such a file, or holds tokens that the base does not have.
        """
        cache = cls(capacity)
        try:
            with safe_open(path, framework="pt") as file:
                if (file.metadata() or {}).get("format") != FORMAT:
                    raise ValueError("it has another format")
                contexts, following = file.get_tensor("contexts"), file.get_tensor("following")
            if contexts.shape != (len(following), max(ORDERS)) or following.shape[1:] != (KEPT, 2):
                raise ValueError("its tables have other shapes")
            known = {
                tuple(token for token in context if token >= 0): Counter(
                    {token: times for token, times in pairs if token >= 0 and times > 0}
                )
                for context, pairs in zip(contexts.tolist(), following.tolist(), strict=True)
            }
        except FileNotFoundError:
            raise
        except Exception as error:
            raise ValueError(f"n-gram cache ({path}) cannot be read: {error}; save it again") from error
        largest = max(following[..., 0].flatten().tolist(), default=0)
        if vocab_size is not None and largest >= vocab_size:
            raise ValueError(
                f"n-gram cache ({path}) holds token {largest}, and the base has {vocab_size} tokens: it was saved with"
                " another base; give another file"
            )
        cache._counts.update(list(known.items())[-capacity:])
        return cache

    def fill(self, texts: Iterable[Sequence[int]]) -> int:
        """Learn from many texts; returns the number of tokens read."""
        total = 0
        for tokens in texts:
            self.learn(tokens)
            total += len(tokens)
        return total


class NgramDrafter(Drafter):
    """Proposes the most likely tree of tokens that followed the last tokens in other texts.

    Args:
        cache: The cache.
        nodes: N, the root included.
        branches: Most children of a node; 1 = a chain.
    """

    def __init__(self, cache: NgramCache, nodes: int, branches: int = KEPT) -> None:
        if nodes < 2:
            raise ValueError(f"nodes ({nodes}) must be at least 2 for an n-gram cache; give a larger tree budget")
        self.cache, self.nodes, self._branches = cache, nodes, branches
        self._last: tuple[weakref.ref[Tensor], list[int], list[list[Node]]] | None = None

    def propose(self, state: DecodeState, _: Cached = (), /) -> Draft:
        """A tree below ``state.roots``; only the root if no context is known."""
        width = max(ORDERS)
        recent = state.positions[:, None] + torch.arange(1 - width, 1, device=state.positions.device)
        contexts = state.history.gather(1, recent.clamp(min=0)).tolist()
        positions = state.positions.tolist()
        if self._last is not None and self._last[0]() is state.history:  # otherwise rows have joined or left
            self._judge(contexts, positions, *self._last[1:])
        rows = zip(contexts, positions, state.active.tolist(), strict=True)
        trees = [
            self.cache.tree(context[max(0, width - 1 - position) :], self.nodes if active else 1, self._branches)
            for context, position, active in rows
        ]
        self._last = weakref.ref(state.history), positions, trees
        draft, device = build(trees), state.roots.device
        if device.type == "cpu":
            return draft
        return Draft(draft.tokens.to(device), draft.parents.to(device), draft.depth)

    def _judge(
        self, contexts: list[list[int]], positions: list[int], before: list[int], trees: list[list[Node]]
    ) -> None:
        """Observe whether the most likely first guess of each tree was right, if the text that followed is known."""
        for context, position, old, tree in zip(contexts, positions, before, trees, strict=True):
            if len(tree) > 1 and 0 < position - old <= len(context):
                self.cache.judge(tree[1].score, tree[1].token == context[old - position])
