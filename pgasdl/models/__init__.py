"""Layer lists of four networks, in the order in which a training step exchanges the gradients."""

from __future__ import annotations

from importlib import resources

from pgasdl.errors import ConfigError

NAMES = ("alexnet", "googlenet", "resnet50", "vgg16")


def layers(name: str) -> tuple[int, ...]:
    """Return the size of each parameter, in the order in which backward makes its gradient."""
    if name not in NAMES:
        raise ConfigError(f"no model {name!r}; there are {', '.join(NAMES)}")
    text = resources.files(__name__).joinpath(f"{name}.txt").read_text(encoding="ascii")
    return tuple(int(line) for line in text.split())
