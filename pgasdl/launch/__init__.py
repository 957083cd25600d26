"""Starting ranks: which launcher started this process, and ``pgasdl run``, our own."""

from pgasdl.launch.detect import Launch, detect

__all__ = ["Launch", "detect"]
