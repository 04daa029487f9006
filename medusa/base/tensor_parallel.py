"""Tensor parallel: how transformers divides a base among processes, and what rank 0 tells the others.

rank 0        decides what is computed, and announces each pass of the base before it makes it
other ranks   make the same pass with their share of heads and weights          (medusa/loading/tensor_parallel.py)

Embeddings and output layer are whole on every rank: drafters use both without asking anyone.
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
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from medusa.attention import TreePlan
from medusa.cache import BlockPool

OTHER_WAYS = ("device_map", "distributed_config", "quantization_config")
"""Options of ``from_pretrained`` that place or change weights otherwise."""
REST = 0.3
"""Seconds between the last message and the end of a process: gloo's threads abort it where that is at once."""
Command = tuple[str, tuple[Any, ...]]
"""What other ranks do next: a method of ``Follower``, and its arguments on the host."""


class GroupError(RuntimeError):
    """The ranks are no longer at the same place of the computation."""


class Others(Protocol):
    """Ranks that compute with this one; what happens within the contexts they do too.

    Attributes:
        broken: Some of them may be somewhere else, and nothing can be computed any more.
    """

    broken: bool

    def run(self, layers: int, pool: BlockPool, plan: TreePlan, /) -> AbstractContextManager[None]:
        """A pass over the rows of a plan, through so many layers."""

    def commit(self, pool: BlockPool, path_SA: Tensor, counts_S: Tensor, /) -> AbstractContextManager[None]:
        """Accepted paths of the last plan of this pool are kept."""

    def hidden_states(
        self, layers: int, ids_BT: Tensor, positions_BT: Tensor | None, /
    ) -> AbstractContextManager[None]:
        """A plain pass."""


class Nobody:
    """The base is whole, and no other rank computes with this one."""

    broken = False

    def alone(self, *_: object) -> AbstractContextManager[None]:
        """Nothing to tell."""
        return nullcontext()

    run = commit = hidden_states = alone


class Leader:
    """Rank 0 of several; one at a time of its threads computes.

    An error in the middle of a pass leaves the others in it: from then on all that is asked fails. They are told to end
    when this process ends; should it be killed, they see their connection closed.

    Args:
        group: All ranks, for messages between hosts.
    """

    started: ClassVar[bool] = False
    """Whether there is one: other ranks follow it to the end of the process, and never another."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        Leader.started, self.broken = True, False
        self._group, self._lock, self._count = group, threading.Lock(), count()
        self._numbers: weakref.WeakKeyDictionary[BlockPool, int] = weakref.WeakKeyDictionary()
        self._gone: deque[int] = deque()
        atexit.register(self._end)

    def run(self, layers: int, pool: BlockPool, plan: TreePlan) -> AbstractContextManager[None]:
        """See ``Others``, here and below."""
        drafts = [
            (_host(draft.tokens), _host(draft.parents), draft.depth, draft.straight, draft.sizes)
            for draft in plan.drafts
        ]
        table = _host(plan.table.blocks[:, : plan.width])
        return self._announced(
            "run", layers, self._number(pool), pool.cache.blocks, drafts, _host(plan.lengths), plan.kv_length, table
        )

    def commit(self, pool: BlockPool, path_SA: Tensor, counts_S: Tensor) -> AbstractContextManager[None]:
        """Keys and values of accepted paths."""
        return self._announced("commit", self._number(pool), _host(path_SA), _host(counts_S))

    def hidden_states(self, layers: int, ids_BT: Tensor, positions_BT: Tensor | None) -> AbstractContextManager[None]:
        """Without a cache."""
        positions = None if positions_BT is None else _host(positions_BT)
        return self._announced("hidden_states", layers, _host(ids_BT), positions)

    @contextmanager
    def _announced(self, name: str, *arguments: Any) -> Iterator[None]:
        with self._lock, torch.no_grad():  # transformers' layers communicate otherwise where there are gradients
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
    """What rank 0 announces next.

    Raises:
        RuntimeError: It has gone.
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
        path: Of the base.
        device: As it was asked for.
        options: With "tp_plan": "auto", or rules in place of some of transformers' own.
        refused: What else was asked for, by name, and does not go with it.

    Raises:
        ValueError: The base cannot be divided so.
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
        logging.getLogger("medusa").setLevel(logging.WARNING)  # rank 0 tells what all find out
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
    """As it is sent: pickled tensors are slow, and bring all the memory that they are a part of."""
    return x.cpu().numpy()
