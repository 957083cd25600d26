"""The CUDA streams of PyTorch, CuPy and others, as the handles that the driver takes."""

from __future__ import annotations

import sys

from pgasdl.errors import ConfigError

_DEFAULT = 0
_PROTOCOL = 0


def stream_handle(stream: object, ordinal: int) -> int:
    """Return the handle of a stream; ConfigError: it is none.

    ``stream`` : a stream of PyTorch, of CuPy, or with ``__cuda_stream__``; a handle; None: the
    current stream of PyTorch if it uses CUDA here, else of CuPy if loaded, else the default stream
    ``ordinal`` : the GPU whose current stream is meant
    """
    if stream is None:
        stream = _current(ordinal)
    if isinstance(stream, int) and not isinstance(stream, bool):
        handle: object = stream
    elif hasattr(stream, "__cuda_stream__"):
        version, handle = stream.__cuda_stream__()
        if version != _PROTOCOL:
            raise ConfigError(
                f"stream {stream!r:.100} follows version {version} of __cuda_stream__: only "
                f"version {_PROTOCOL} is known"
            )
    else:
        # PyTorch's before 2.9 and CuPy's before 14, which lack the protocol.
        handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", None))
    if not isinstance(handle, int) or isinstance(handle, bool) or not 0 <= handle < 2**64:
        raise ConfigError(
            f"stream {stream!r:.100} is refused: pass a stream of PyTorch or CuPy, an object with "
            "__cuda_stream__, a handle as an integer, or None for the current stream"
        )
    return handle


def _current(ordinal: int) -> object:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return torch.cuda.current_stream(ordinal)
    cupy = sys.modules.get("cupy")
    return _DEFAULT if cupy is None else cupy.cuda.get_current_stream(ordinal)
