"""A server of a small model in a thread, as it runs behind ``medusa serve``."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from medusa import MedusaModel
from medusa.serve.api.app import create_app
from medusa.serve.api.service import Service
from medusa.serve.engine import Engine
from medusa.serve.grammar import Grammars
from medusa.serve.listening import Server, bind, url
from medusa.serve.metrics import Metrics
from medusa.serve.models import Models
from medusa.serve.recorder import Recorder
from medusa.serve.settings import ApiSettings, EngineSettings


@dataclass
class Live:
    """A server that runs.

    Attributes:
        url: Its address, without /v1.
    """

    url: str
    engine: Engine
    server: Server
    thread: threading.Thread

    def stop(self) -> None:
        """End the server, and wait for it."""
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive(), "the server ends"

    def client(self):
        """OpenAI's own, which asks nothing twice."""
        import openai  # it takes a second, and most files need none

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)


@contextmanager
def serving(
    model: MedusaModel, engine: EngineSettings | None = None, api: ApiSettings | None = None, drain: float = 5.0,
    recorder: Recorder | None = None,
) -> Iterator[Live]:  # fmt: skip
    """Serve a model under the name "small" until the end."""
    model.generate([1], max_new_tokens=2)  # builds the kernels, which takes longer than clients wait
    # Not the share of the memory that a real server takes: servers of many tests lie about for a while.
    settings = engine or EngineSettings()
    settings = replace(settings, cache_tokens=settings.cache_tokens or 16_384)
    running = Engine(model, settings, Metrics("small"), recorder)
    app = create_app(Service(running, Models(running, "small"), Grammars(model.base), api or ApiSettings()), drain)
    with bind("127.0.0.1", 0) as listening:
        server = Server(app, listening, drain)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        live = Live(url(listening), running, server, thread)
        yield live
        live.stop()
