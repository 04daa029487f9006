"""Model names for requests: the base with its own heads, and other heads by their names."""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from medusa.formats import load_heads
from medusa.heads import DraftHeads
from medusa.io.hub import fetch_heads
from medusa.serve.engine import Engine

logger = logging.getLogger(__name__)


class UnknownModelError(LookupError):
    """There is no model, or no heads, of this name."""


@dataclass
class Models:
    """The engine's base and the heads on it.

    Attributes:
        name: Name of the base; requests with this name, or none, use its own heads.
        paths: Directories or Hub ids of the named heads.
    """

    engine: Engine
    name: str
    paths: dict[str, str] = field(default_factory=dict)
    started: int = field(default_factory=lambda: int(time.time()))
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def heads_of(self, model: str | None) -> str | None:
        """The value of ``Speculation.heads`` for a request's ``model``.

        Raises:
            UnknownModelError: There is no such model.
        """
        if model in (None, self.name):
            return None
        if model not in self.engine.model.named:
            raise UnknownModelError(f"model ({model}) does not exist; GET /v1/models lists those that do")
        return model

    def listing(self) -> list[dict[str, Any]]:
        """All models, for /v1/models."""
        model = self.engine.model
        sets = {self.name: model.heads, **model.named}
        return [
            {
                "id": name,
                "object": "model",
                "created": self.started,
                "owned_by": "medusa",
                "root": self.name,
                "parent": None if name == self.name else self.name,
                "max_model_len": model.base.context_length,
                "drafters": model.drafters.names(None if name == self.name else name),
                "heads": None if heads is None else _described(heads, self.paths.get(name)),
            }
            for name, heads in sets.items()
        ]

    async def load(self, name: str, path: str, revision: str | None = None) -> None:
        """Add heads while requests run; new requests may name them.

        Raises:
            ValueError: The name is taken, or the heads cannot be used on this base.
        """
        async with self._changing:
            if name == self.name or name in self.engine.model.named:
                raise ValueError(f"heads ({name}) are there already; remove them first, or choose another name")
            heads = await asyncio.to_thread(read_heads, path, revision)
            model = self.engine.model
            new = await asyncio.to_thread(model.with_heads, {**model.named, name: heads})
            await self.engine.call(lambda: self.engine.use(new))
            self.paths[name] = path
            logger.info("heads %s loaded from %s", name, path)

    async def remove(self, name: str) -> None:
        """Remove heads; requests that run with them continue.

        Raises:
            UnknownModelError: There are no heads of this name.
        """
        async with self._changing:
            model = self.engine.model
            if name not in model.named:
                raise UnknownModelError(f"heads ({name}) are not loaded; GET /v1/models lists those that are")
            left = {other: heads for other, heads in model.named.items() if other != name}
            new = await asyncio.to_thread(model.with_heads, left)
            await self.engine.call(lambda: self.engine.use(new))
            self.paths.pop(name, None)
            logger.info("heads %s removed", name)


def read_heads(path: str, revision: str | None = None) -> DraftHeads:
    """Read heads of any format from a directory or the Hub.

    Raises:
        ValueError: They cannot be read, or they change the base (Medusa-2).
    """
    try:
        heads = load_heads(fetch_heads(path, revision), dtype=None)
    except (OSError, KeyError, SafetensorError) as error:
        raise ValueError(f"heads ({path}) cannot be read: {error}") from error
    heads.check_finite(path)
    if heads.config.base_adapter:
        raise ValueError(f"heads ({path}) change the base (Medusa-2); start a server of their own for them")
    return heads


def _described(heads: DraftHeads, path: str | None) -> dict[str, Any]:
    config = heads.config
    return {"architecture": config.architecture, "num_heads": config.num_heads, "path": path and Path(path).as_posix()}
