"""The roles of ranks in tensor parallelism: rank 0 decides what is computed, and the others follow until it ends."""

import logging
import signal
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from medusa.attention import TreePlan
from medusa.attention.contract import BlockTable
from medusa.base.model import BaseModel
from medusa.base.tensor_parallel import Leader, leave, receive
from medusa.cache import BlockPool
from medusa.tree import Draft

logger = logging.getLogger(__name__)

PATIENCE = timedelta(days=365)
"""How long other ranks wait for work. They notice at once if rank 0 has ended."""


def lead_or_follow(base: BaseModel) -> BaseModel:
    """The base for rank 0, or unchanged if it is not divided; on other ranks this function does not return.

    Raises:
        SystemExit: On other ranks, when rank 0 ends.
    """
    if base.ranks == 1:
        return base
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    if dist.get_rank() == 0:
        logger.info("base (%s): tensor parallel on %d ranks, steps run eagerly", base.name, base.ranks)
        return base.leading(Leader(group))
    sys.exit(Follower(base).follow(group))


class Follower:
    """Repeats the passes of rank 0 with this rank's share of the base.

    Args:
        base: The loaded base; tests at load have given the same results on all ranks.
    """

    def __init__(self, base: BaseModel) -> None:
        self._bases = {base.num_layers: base}
        self._base, self._device = base, base.device
        self._pools: dict[int, BlockPool] = {}
        self._plans: dict[int, TreePlan] = {}

    @torch.inference_mode()
    def follow(self, group: dist.ProcessGroup) -> int:
        """Run announced commands until the end; returns the exit status, 1 if rank 0 ended without a message."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):  # signals reach all ranks, and rank 0 may still compute
                signal.signal(number, signal.SIG_IGN)
        while True:
            try:
                name, arguments = receive(group)
            except RuntimeError:
                logger.warning("rank 0 has ended, so this rank (%d) ends too", dist.get_rank())
                return 1
            if name == "end":
                leave()
                return 0
            getattr(self, name)(*arguments)

    def run(
        self, layers: int, number: int, blocks: int, drafts: Sequence[Any], lengths: Any, kv_length: int, table: Any
    ) -> None:
        """A pass over the rows of a plan; see ``Leader``, here and below."""
        base, pool = self._of(layers), self._pool(number, blocks)
        trees = [
            Draft(self._tensor(tokens), self._tensor(parents), depth, straight=straight, sizes=sizes)
            for tokens, parents, depth, straight, sizes in drafts
        ]
        places = BlockTable(self._tensor(table), pool.size)
        plan = TreePlan(trees, self._tensor(lengths), kv_length, places, base.attention, base.spans)
        self._plans[number] = plan
        base.run(pool, plan)

    def commit(self, number: int, path: Any, counts: Any) -> None:
        """See ``Leader``: accepted paths of the pool's last plan."""
        self._base.commit(self._pools[number], self._plans[number], self._tensor(path), self._tensor(counts))

    def hidden_states(self, layers: int, ids: Any, positions: Any) -> None:
        """See ``Leader``: a plain pass."""
        self._of(layers).hidden_states(self._tensor(ids), None if positions is None else self._tensor(positions))

    def forget(self, numbers: Sequence[int]) -> None:
        """Delete pools that are no longer used."""
        for number in numbers:
            self._pools.pop(number, None)
            self._plans.pop(number, None)

    def _of(self, layers: int) -> BaseModel:
        if layers not in self._bases:
            self._bases[layers] = self._base.shallow(layers)
        return self._bases[layers]

    def _pool(self, number: int, blocks: int) -> BlockPool:
        """This rank's share of a pool of rank 0; it has the same number of blocks."""
        if number not in self._pools:
            self._pools[number] = self._base.new_pool((blocks - 1) * BlockPool.size)
        pool = self._pools[number]
        if pool.cache.blocks < blocks:
            pool.grow(blocks)
        return pool

    def _tensor(self, sent: Any) -> Tensor:
        return torch.from_numpy(sent).to(self._device)
