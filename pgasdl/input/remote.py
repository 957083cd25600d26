"""Requests to the storage of a URL by fsspec, each with a time limit."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from pgasdl.errors import DataError, UnavailableError

_REFUSALS = (401, 403, 404, 410)  # of HTTP: another try gives the same answer
_Out = TypeVar("_Out")


def ask(url: str, method: str | Callable[..., Any], timeout: float, **options: Any) -> Any:
    """Call a method of a URL's file system, within the time of a try.

    ``method`` may be a function, which is called with a file system that fsspec has asynchronously.
    """
    core, asyn = library("fsspec.core"), library("fsspec.asyn")
    try:
        kind = core.get_filesystem_class(url.partition("://")[0])
    except ImportError as error:
        if url.startswith("http"):
            raise _unavailable(f"{url.partition('?')[0]}: {error}") from error
        raise UnavailableError(f"{url}: {error}") from error  # it names the package
    except ValueError as error:
        raise DataError(f"{url}: {error}") from error
    try:
        if kind.async_impl:
            system, path = core.url_to_fs(url, use_listings_cache=False)
            call = partial(method, system) if callable(method) else getattr(system, f"_{method}")
            return asyn.sync(system.loop, call, path, timeout=timeout, **options)

        def call_new() -> Any:
            system, path = core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
            return getattr(system, str(method))(path, **options)

        return _in_thread(call_new, timeout)
    except TimeoutError:
        raise TimeoutError(f"no answer within {timeout:g} s") from None


async def ranged(system: Any, url: str, start: int, end: int) -> tuple[bytes, Mapping[str, str]]:
    """Return a range of what HTTP has, and the answer's headers, which fsspec's own call drops."""
    options = {**system.kwargs}
    headers = {**options.pop("headers", {}), "Accept-Encoding": "identity"}
    headers["Range"] = f"bytes={start}-{end - 1}"
    session = await system.set_session()
    async with session.get(system.encode_url(url), headers=headers, **options) as answer:
        answer.raise_for_status()
        told = answer.headers.get("Content-Range", "")
        if answer.status == 206 and not told.lower().startswith(f"bytes {start}-"):
            raise OSError(f"another range, {told!r} came")
        return await answer.read(), answer.headers


def cause(error: Exception) -> BaseException:
    """Return an HTTP server's error: fsspec's info replaces it by FileNotFoundError."""
    cause = error.__cause__
    return cause if cause and type(cause).__module__.startswith("aiohttp") else error


def is_refusal(error: BaseException) -> bool:
    """Whether another try cannot succeed: storage does not have the file, or refuses it."""
    status = getattr(error, "status", None)
    return status in _REFUSALS or isinstance(error, FileNotFoundError | PermissionError)


def library(name: str) -> Any:
    """Import an optional library."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _unavailable(f"no {name}") from error


def _in_thread(call: Callable[[], _Out], timeout: float) -> _Out:
    """Call, and do not wait for the call if it takes longer."""
    future: Future[_Out] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="pgasdl-storage", daemon=True).start()
    return future.result(timeout)


def _unavailable(reason: str) -> UnavailableError:
    return UnavailableError(f"{reason} (pip install 'pgasdl[data]')")
