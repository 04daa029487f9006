"""Tensor parallelism: transformers divides a base among processes, and rank 0 announces its passes to the others.

rank 0        decides what is computed, and announces each pass of the base before it runs
other ranks   run the same pass with their share of heads and weights           (medusa/loading/tensor_parallel.py)

Embeddings and output layer are complete on every rank, so drafters use them without communication.
"""

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch import distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from medusa.attention import TreePlan
from medusa.cache import BlockPool

OTHER_WAYS = ("device_map", "distributed_config", "quantization_config")
"""Options of ``from_pretrained`` that place or change weights in other ways."""
REST = 0.3
"""Seconds between the last message and the end of a process; without this pause gloo's threads abort it."""
Command = tuple[str, tuple[Any, ...]]
"""The next task of other ranks: a method of ``Follower``, and its arguments on the host."""


class GroupError(RuntimeError):
    """The ranks are no longer in step with each other."""


class Nobody:
    """The base is whole, and no other rank computes with this one."""

    broken = False
    """Whether ranks may be out of step, so that nothing can be computed any more."""

    def alone(self, *_: object) -> AbstractContextManager[None]:
        """Announce nothing."""
        return nullcontext()

    run = commit = hidden_states = alone


class Leader:
    """Rank 0 of several; only one of its threads computes at a time.

    After an error in the middle of a pass the other ranks are still in it, so all later calls fail. The others are told
    to end when this process ends; if it is killed, they see their connection closed.

    Args:
        group: All ranks, for messages between hosts.
    """

    started: ClassVar[bool] = False
    """Whether a leader exists: other ranks follow one leader to the end of the process, and never another."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        Leader.started, self.broken = True, False
        self._group, self._lock, self._count = group, threading.Lock(), count()
        self._numbers: weakref.WeakKeyDictionary[BlockPool, int] = weakref.WeakKeyDictionary()
        self._gone: deque[int] = deque()
        atexit.register(self._end)

    def run(self, layers: int, pool: BlockPool, plan: TreePlan) -> AbstractContextManager[None]:
        """A pass over the rows of a plan, through this number of layers; the others repeat it, as below."""
        drafts = [
            (_host(draft.tokens), _host(draft.parents), draft.depth, draft.straight, draft.sizes)
            for draft in plan.drafts
        ]
        table = _host(plan.table.blocks[:, : plan.width])
        return self._announced(
            "run", layers, self._number(pool), pool.cache.blocks, drafts, _host(plan.lengths), plan.kv_length, table
        )

    def commit(self, pool: BlockPool, path_SA: Tensor, counts_S: Tensor) -> AbstractContextManager[None]:
        """A commit of accepted paths of this pool's last plan."""
        return self._announced("commit", self._number(pool), _host(path_SA), _host(counts_S))

    def hidden_states(self, layers: int, ids_BT: Tensor, positions_BT: Tensor | None) -> AbstractContextManager[None]:
        """A plain pass without a cache."""
        positions = None if positions_BT is None else _host(positions_BT)
        return self._announced("hidden_states", layers, _host(ids_BT), positions)

    @contextmanager
    def _announced(self, name: str, *arguments: Any) -> Iterator[None]:
        with self._lock, torch.no_grad():  # with gradients, transformers' layers communicate in another way
            if self.broken:
                raise GroupError("a pass of the base has failed on a rank of tensor parallel; start all of them again")
            try:
                if self._gone:
                    self._send("forget", [self._gone.popleft() for _ in range(len(self._gone))])
                self._send(name, *arguments)
                yield
            except BaseException:
                self.broken = True
                raise

    def _number(self, pool: BlockPool) -> int:
        if pool not in self._numbers:
            self._numbers[pool] = number = next(self._count)
            weakref.finalize(pool, self._gone.append, number).atexit = False
        return self._numbers[pool]

    def _send(self, name: str, *arguments: Any) -> None:
        dist.broadcast_object_list([(name, arguments)], src=0, group=self._group, device=torch.device("cpu"))

    def _end(self) -> None:
        if not self.broken and self._lock.acquire(blocking=False):  # not while a thread is in the middle of a pass
            self._send("end")
            leave()


def receive(group: dist.ProcessGroup) -> Command:
    """Receive the next announcement of rank 0.

    Raises:
        RuntimeError: Rank 0 has ended.
    """
    messages: list[Any] = [None]
    dist.broadcast_object_list(messages, src=0, group=group, device=torch.device("cpu"))
    command: Command = messages[0]
    return command


def leave() -> None:
    """End the communication, before the process ends."""
    dist.destroy_process_group()
    time.sleep(REST)


def divide(
    path: str, device: torch.device, options: Mapping[str, Any], refused: Mapping[str, object]
) -> tuple[torch.device, dict[str, Any]]:
    """This rank's device, and the options of ``from_pretrained`` with which transformers loads its share.

    Args:
        path: Path or Hub id of the base.
        device: The requested device.
        options: Contains "tp_plan": "auto", or rules that replace some of transformers' own.
        refused: Other requested features, by name, that cannot be combined with it.

    Raises:
        ValueError: The base cannot be divided in this way.
    """
    options, ranks = dict(options), int(os.environ.get("WORLD_SIZE", "1"))
    plan = options.pop("tp_plan")
    if ranks == 1:
        raise ValueError(
            f"tensor parallel (tp_plan {plan}) divides the base among processes, and this is the only one; start"
            " several with torchrun --nproc_per_node N"
        )
    if Leader.started:
        raise ValueError(f"base ({path}) is the second one under tensor parallel; load one in each start of torchrun")
    for name, value in ({name: options.get(name) for name in OTHER_WAYS} | dict(refused)).items():
        if value:
            raise ValueError(f"{name} ({value}) cannot be combined with tensor parallel; leave one of them out")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device != torch.device(accelerator.type if accelerator else "cpu"):
        raise ValueError(f"device ({device}) cannot be chosen: each rank of tensor parallel has its own; leave it out")
    config = AutoConfig.from_pretrained(path)
    if hasattr(config, "quantization_config"):
        raise ValueError(f"base ({path}) has quantised weights, which cannot be divided; leave tensor parallel out")
    text = config.get_text_config()
    queries, keys = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if queries % ranks or keys % ranks:
        raise ValueError(
            f"processes ({ranks}) do not divide the base's heads ({queries} of queries, {keys} of keys); start as many"
            " as divide both"
        )
    if int(os.environ.get("RANK", "0")):
        logging.getLogger("medusa").setLevel(logging.WARNING)  # all ranks would log the same as rank 0
    rules = (dict(plan) if isinstance(plan, Mapping) else {}) | dict.fromkeys(_ends(config), "replicate")
    options["distributed_config"] = DistributedConfig(tp_plan=rules, tp_size=ranks)
    return device if device.type == "cpu" else torch.device(device.type, int(os.environ["LOCAL_RANK"])), options


def _ends(config: Any) -> list[str]:
    """Names of the embeddings and the output layer."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if any(module is end for end in ends)]


def _host(x: Tensor) -> Any:
    """A tensor in the form that is sent: pickled tensors are slow, and include all the memory behind a view."""
    return x.cpu().numpy()
