"""Layer lists of four networks, as gradients come: what a training step has to exchange."""

from __future__ import annotations

from importlib import resources

from pgasdl.errors import ConfigError

NAMES = ("alexnet", "googlenet", "resnet50", "vgg16")


def layers(name: str) -> tuple[int, ...]:
    """Elements of each parameter tensor, in the order in which backward produces its gradient.

    Raises
    ------
    ConfigError
        No such model.
    """
    if name not in NAMES:
        raise ConfigError(f"no model {name!r}; there are {', '.join(NAMES)}")
    text = resources.files(__name__).joinpath(f"{name}.txt").read_text(encoding="ascii")
    return tuple(int(line) for line in text.split())
