"""The page's own files, which say nothing about jobs: anybody may have them."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

_FOLDER = Path(__file__).parent / "page"
# With these headers a browser loads nothing from elsewhere, whatever the page contains.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def is_asset(path: str) -> bool:
    """Whether a path is the page's."""
    return path == "/" or path.startswith("/page/")


def routes() -> list[BaseRoute]:
    """Return the routes of the page."""

    async def index(_: Request) -> Response:
        return FileResponse(_FOLDER / "index.html", headers=_HEADERS)

    return [Route("/", index), Mount("/page", _Files(directory=_FOLDER))]


class _Files(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        """Answer with a file and the headers above."""
        answer = await super().get_response(path, scope)
        answer.headers.update(_HEADERS)
        return answer
