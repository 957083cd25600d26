"""Calls of a process group that backend "pgasdl" refuses, by name, and what to do instead.

PyTorch's class has them, and hands them to a backend in C++, which a group that is made in Python
has not: without these it says that it "could not find the default backend type".
"""

from __future__ import annotations

from typing import Any, NoReturn

from pgasdl.errors import UnavailableError

_HOOKS = "wait for what the call returns, or for its future"
_NEW_GROUP = "destroy the group, and call init_process_group with the ranks that are to be in it"
_ENABLED = (
    "init_process_group(..., enable_reconfigure=True) of PyTorch 2.14 makes a group that has it"
)
REFUSED = {
    "_add_ephemeral_timeout": "give the call a timeout, or the group one by set_timeout",
    "_register_on_completion_hook": _HOOKS,
    "_wait_for_pending_works": _HOOKS,
    "get_reconfigure_handle": _ENABLED,
    "merge_remote_group": f"a new rank needs another context: {_NEW_GROUP}",
    "new_window": "pgasdl.torch.Window puts into peers' tensors",
    "reconfigure": _ENABLED,
    "register_abort_hook": _HOOKS,
    "register_post_hook": _HOOKS,
    "register_pre_hook": _HOOKS,
    "unregister_abort_hook": _HOOKS,
    "unregister_post_hook": _HOOKS,
    "unregister_pre_hook": _HOOKS,
}


class Refusals:
    """The methods of ``REFUSED``, and no to each question for what they do."""

    supports_splitting = supports_coalescing = supports_shrinking = False
    supports_time_estimate = supports_window = supports_reconfigure = False
    supports_abort_hooks = supports_completion_hooks = False

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Whether it makes tensors."""
        return False


def _refusal(name: str, instead: str) -> Any:
    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise UnavailableError(f'backend "pgasdl" has no {name}: {instead}')

    refuse.__name__, refuse.__doc__ = name, "Refuse it."
    return refuse


for _name, _instead in REFUSED.items():
    setattr(Refusals, _name, _refusal(_name, _instead))
