"""The cache that transformers' layers write to and read from during a pass."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from medusa.attention.contract import TreePlan
from medusa.cache.index import BLOCK
from medusa.recurrence import RecurrentStates


class Arena:
    """Keys and values [blocks, BLOCK, Hkv, D] of one layer; on a CPU pages that were never written use no memory."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def allocate(self, blocks: int, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate memory for key and value states [B, Hkv, N, D], on their device."""
        self.keys, self.values = (
            states.new_empty(blocks, BLOCK, states.shape[1], states.shape[3]) for states in (key_states, value_states)
        )

    @torch.inference_mode()
    def grow(self, blocks: int) -> None:
        """Move all blocks to memory for ``blocks`` of them."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            if old is not None:
                new = old.new_empty(blocks, *old.shape[1:])
                new[: len(old)] = old
                setattr(self, name, new)

    @property
    def buffers(self) -> list[Tensor]:
        """Keys and values; empty before the first write."""
        return [buffer for buffer in (self.keys, self.values) if buffer is not None]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return sum(buffer[:1].nbytes for buffer in self.buffers)


class PassLayer(CacheLayerMixin):
    """One layer of a pass: rows are written to the places of the plan, and attention gets the whole arena.

    Attention gets a copy [1, Hkv, places, D] of the sequences' keys and values instead if the layer first computes on
    them, and if masks are passed with each call.
    """

    def __init__(self, cache: "PassCache", arena: Arena) -> None:
        super().__init__()
        # No reference to the cache itself: a cycle would keep all memory until the garbage collector runs.
        self._cache, self._arena = cast(PassCache, weakref.proxy(cache)), arena

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the arena, with the head sizes and device of the first states."""
        self._arena.allocate(self._cache.blocks, key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write states [1, Hkv, R, D]; returns keys and values as attention reads them."""
        if self._arena.keys is None:
            self.lazy_initialization(key_states, value_states)
        places_R, seen = self._cache.places(key_states.device), []
        for buffer, states in zip(self._arena.buffers, (key_states, value_states), strict=True):
            rows = buffer.flatten(0, 1)
            rows.index_copy_(0, places_R, states[0].transpose(0, 1))
            seen.append(self._cache.seen(buffer))
        return seen[0], seen[1]

    def get_seq_length(self) -> int:
        """Number of places before the pass's rows, for layers that read it; positions are passed separately."""
        return self._cache.before

    def get_max_length(self) -> int:
        """No limit is known."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that a mask covers, and the offset of the first."""
        return self._cache.before + query_length, 0


class PassCache(Cache):
    """The pool as a transformers cache, for one pass at a time.

    Attributes:
        blocks: Number of blocks of the arenas.
    """

    def __init__(self, arenas: list[Arena], blocks: int, recurrent: RecurrentStates) -> None:
        super().__init__(layers=[PassLayer(self, arena) for arena in arenas])
        self.blocks, self._recurrent = blocks, recurrent
        self._explicit = self._gathered = False
        self._plan: TreePlan | None = None
        self._places: dict[torch.device, Tensor] = {}

    @contextmanager
    def running(self, plan: TreePlan, explicit: bool = False, gathered: bool = False) -> Iterator["PassCache"]:
        """The cache of this pass, until its end.

        Args:
            plan: The plan of the pass; with explicit masks, of one sequence.
            explicit: Masks are passed with each call.
            gathered: Layers compute on cached keys and values before attention reads them.
        """
        self._plan, self._explicit, self._gathered = plan, explicit, gathered
        try:
            with self._recurrent.running(plan):
                yield self
        finally:
            self._plan, self._places = None, {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """No state, so that recurrent layers compute all rows at once; ``medusa.recurrence`` has their states."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """See ``get_conv_state``."""

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *_: object, **__: object) -> Tensor:
        """Note which layer computes now; its rows come back as they are."""
        self.plan.recurrent.layer = layer_idx
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor | None, layer_idx: int, *_: object, **__: object) -> None:
        """Nothing: states are kept where they are computed."""

    @property
    def before(self) -> int:
        """Number of places before the pass's rows, for layers that read it."""
        return self.plan.kv_length - self.plan.rows if self._explicit else 0

    @property
    def plan(self) -> TreePlan:
        """The plan of the running pass."""
        assert self._plan is not None, "a pass runs"
        return self._plan

    def places(self, device: torch.device) -> Tensor:
        """Places [R] of the pass's rows on this device; the layers of a base may be on several devices."""
        if device not in self._places:
            self._places[device] = self.plan.places.to(device)
        return self._places[device]

    def seen(self, buffer: Tensor) -> Tensor:
        """The part of keys or values [blocks, BLOCK, Hkv, D] that attention reads."""
        if self._explicit:
            return self._side_by_side(buffer.flatten(0, 1))
        if self._gathered:
            blocks = self.plan.table.blocks[:, : self.plan.width].flatten().to(buffer.device)
            return buffer[blocks].flatten(0, 1).transpose(0, 1)[None]
        return buffer

    def _side_by_side(self, rows: Tensor) -> Tensor:
        """Keys or values [1, Hkv, kv_length, D] of the plan's only sequence; 0 where nothing was written."""
        plan = self.plan
        index_S = torch.arange(plan.kv_length, device=plan.lengths.device)
        written_S = index_S < plan.lengths[0] + plan.rows
        places_S = plan.table.places(torch.where(written_S, index_S, 0)[None])[0].to(rows.device)
        kept = torch.where(written_S.to(rows.device)[:, None, None], rows[places_S], 0)
        return kept.transpose(0, 1)[None]
