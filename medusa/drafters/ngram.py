"""Drafting from earlier texts: the tokens that followed the last ones there.

Prompt lookup searches one text. This cache holds many: completions of requests that use it, or a corpus. It is searched
in the same way, by the longest match and by frequency (suffix decoding, Oliaro et al. 2024). Lookahead decoding (Fu et
al. 2024) and llama.cpp have caches of n-grams too.
"""

import ctypes
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock

import numpy
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from medusa.cache import Cached
from medusa.cpu import native
from medusa.cpu.lookup import EarlierTexts, Search
from medusa.drafters.base import Drafter
from medusa.drafters.continuations import SEARCH, Confidence, Place, Row
from medusa.drafters.merge import node_floor
from medusa.drafters.search import TreeSearch
from medusa.files import replace_file
from medusa.state import DecodeState
from medusa.tree import Draft

CAPACITY = 1 << 20
"""Most tokens of a cache, 19 MB once it is full."""
BUCKETS = 4
"""Tokens for each list of places of pairs."""
MOST_LOOKS = 256
"""Most places of a list that are looked at."""
MIX = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F
"""Odd factors that spread pairs of tokens over the lists."""
END = -1
"""Stands between two texts."""
FORMAT = "medusa-ngrams"


class NgramCache:
    """The last tokens of many texts, and where each pair of tokens stands in them; the oldest are written over.

    Requests of one model that use the drafter share it, so one request learns from the texts of others. Threads may
    share it too.

    Args:
        capacity: Most tokens; it is raised to a power of two.

    Attributes:
        tables: The tables, for the C++ search.
        confidence: Shares of right guesses.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"capacity ({capacity}) of the n-gram cache must be at least 1 token; raise it")
        size = max(2 * SEARCH.longest, 1 << (capacity - 1).bit_length())
        # Numpy's zeros take memory only where they are written.
        zeros = (torch.from_numpy(numpy.zeros(count, numpy.int64)) for count in (size, size, size // BUCKETS))
        self._ring, self._previous, self._latest = zeros
        self.tables = EarlierTexts(
            size, size // BUCKETS, 0, self._ring.data_ptr(), self._previous.data_ptr(), self._latest.data_ptr()
        )
        self.confidence = Confidence(SEARCH)
        self._lock = Lock()

    def __len__(self) -> int:
        """Number of tokens, ends of texts included."""
        return min(self.tables.count, self.tables.size)

    def learn(self, tokens: Sequence[int]) -> None:
        """Add a text."""
        ids = torch.tensor([*tokens, END], dtype=torch.int64)
        with self._lock:
            if native.available():
                native.kernels().medusa_remember(ctypes.byref(self.tables), ids.data_ptr(), len(ids))
                return
            for token in ids.tolist():
                self._add(token)

    def fill(self, texts: Iterable[Sequence[int]]) -> int:
        """Learn from many texts; returns the number of tokens read."""
        total = 0
        for tokens in texts:
            self.learn(tokens)
            total += len(tokens)
        return total

    def find(self, text: Row, search: Search) -> list[Place]:
        """Earlier places of a text's last two tokens, the longest matches first, then the latest."""
        texts, found, whole = self.tables, list[Place](), 0
        oldest, root = max(0, texts.count - texts.size), len(text) - 1
        at = int(self._latest[self._list(int(text[-2]), int(text[-1]))]) - 1 if root else -1
        for _ in range(MOST_LOOKS):
            if at <= oldest or whole >= search.places:
                break
            match = 0
            while match < search.longest and match <= min(root, at - oldest):
                if self._token(at - match) != text[root - match]:
                    break
                match += 1
            if match >= 2:
                whole += match == search.longest
                found.append(Place(at, match))
            before = int(self._previous[at & (texts.size - 1)]) - 1
            if before >= at:
                break
            at = before
        return sorted(found, key=lambda place: (-place.match, -place.at))[: search.places]

    def after(self, _: Row, place: Place, depth: int) -> int:
        """The token so far behind a place; -1 = its text has ended."""
        following = place.at + 1 + depth
        return self._token(following) if following < self.tables.count else END

    def _token(self, place: int) -> int:
        return int(self._ring[place & (self.tables.size - 1)])

    def _list(self, first: int, second: int) -> int:
        mixed = (first * MIX[0] + second * MIX[1]) & (1 << 64) - 1
        return mixed >> 32 & (self.tables.buckets - 1)

    def _add(self, token: int) -> None:
        texts = self.tables
        place, before = texts.count & (texts.size - 1), self._token(texts.count - 1) if texts.count else END
        self._ring[place], self._previous[place] = token, 0
        texts.count += 1
        if before != END and token != END:
            bucket = self._list(before, token)
            self._previous[place] = self._latest[bucket]
            self._latest[bucket] = texts.count

    def save(self, path: str | Path) -> None:
        """Write the texts as one safetensors file, atomically."""
        with self._lock:
            places = torch.arange(self.tables.count - len(self), self.tables.count)
            tokens = self._ring[places & (self.tables.size - 1)].int()
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda beside: save_file({"texts": tokens}, beside, metadata={"format": FORMAT}))

    @classmethod
    def load(cls, path: str | Path, capacity: int = CAPACITY, vocab_size: int | None = None) -> "NgramCache":
        """Read a file that ``save`` wrote; if it exceeds the capacity, the latest texts are kept.

        Args:
            path: The file.
            capacity: Most tokens to keep.
            vocab_size: V of the base that verifies; None = not checked.

        Raises:
            ValueError: The file is not such a file, or holds tokens that the base does not have.
        """
        try:
            with safe_open(path, framework="pt") as file:
                if (file.metadata() or {}).get("format") != FORMAT:
                    raise ValueError("it has another format")
                tokens = file.get_tensor("texts")
            if tokens.dtype != torch.int32 or tokens.ndim != 1:
                raise ValueError("its tokens have another shape")
        except FileNotFoundError:
            raise
        except Exception as error:
            raise ValueError(f"n-gram cache ({path}) cannot be read: {error}; save it again") from error
        largest = int(tokens.max()) if len(tokens) else 0
        if vocab_size is not None and largest >= vocab_size:
            raise ValueError(
                f"n-gram cache ({path}) holds token {largest}, and the base has {vocab_size} tokens: it was saved with"
                " another base; give another file"
            )
        cache = cls(capacity)
        cache.learn(tokens.tolist())
        return cache


class NgramDrafter(Drafter):
    """Proposes the most likely tree of tokens that followed the last tokens in other texts.

    Args:
        cache: The cache.
        nodes: N, the root included.
        chain: Propose chains only.
    """

    def __init__(self, cache: NgramCache, nodes: int, chain: bool = False) -> None:
        if nodes < 2:
            raise ValueError(f"nodes ({nodes}) must be at least 2 for an n-gram cache; give a larger tree budget")
        self.nodes = nodes
        search = SEARCH._replace(nodes=nodes, chain=chain, floor=node_floor(nodes))
        self._search = TreeSearch(search, cache.confidence, cache)

    def propose(self, state: DecodeState, _: Cached = (), /) -> Draft:
        """A tree below ``state.roots``; only the root if nothing like its text is known."""
        return self._search(state)
