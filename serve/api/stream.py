"""Server-sent events."""

import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

from fastapi.responses import StreamingResponse

from serve.api.errors import as_api_error

logger = logging.getLogger(__name__)

DONE = "data: [DONE]\n\n"


def event(body: dict[str, Any]) -> str:
    """One event; in ASCII, since readers of lines end them at some other characters too."""
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


def stream(chunks: AsyncGenerator[dict[str, Any]]) -> StreamingResponse:
    """Chunks as they come; an error ends them, as the last event. A client that goes away ends them too."""

    async def events() -> AsyncGenerator[str]:
        try:
            async for chunk in chunks:
                yield event(chunk)
        except Exception as error:  # noqa: BLE001 - the status is sent already: the stream has to tell it
            if not isinstance(error, ValueError | RuntimeError):
                logger.info("a stream ends early: %s", error)
            yield event(as_api_error(error).body())
        finally:
            await chunks.aclose()
        yield DONE

    return StreamingResponse(
        events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )
