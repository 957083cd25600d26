"""Server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

MEDIA_TYPE = "text/event-stream"
_HEARTBEAT = 10.0  # seconds of silence, at most


def message(kind: str, document: dict[str, Any], number: int | None = None) -> str:
    """Return an event as it is sent."""
    name = "" if number is None else f"id: {number}\n"
    return f"{name}event: {kind}\ndata: {json.dumps(document)}\n\n"


def stream(
    news: Callable[[], tuple[Iterable[str], bool]], closing: Callable[[], bool], every: float
) -> StreamingResponse:
    """Answer with the events that ``news`` returns, called in a thread every so many seconds.

    It returns the events since its last call, and whether these were the last ones of all.
    ``closing`` : whether the server ends
    """

    async def events() -> AsyncIterator[str]:
        spoke = time.monotonic()
        while not closing():
            found, over = await run_in_threadpool(news)
            for each in found:
                spoke = time.monotonic()
                yield each
            if over:
                return
            if time.monotonic() > spoke + _HEARTBEAT:
                spoke = time.monotonic()
                yield ":\n\n"
            await asyncio.sleep(every)

    return StreamingResponse(events(), 200, {"Cache-Control": "no-store"}, MEDIA_TYPE)
