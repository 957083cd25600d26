"""Synthetic images of ImageNet's shape, and a small residual network that classifies them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

N_CLASSES = 4


class Images:
    """Images of three colours, made when they are asked for: always the same for a seed.

    An image is a grating in noise. The class is the grating's direction; its phase is drawn.
    """

    def __init__(self, seed: int, pixels: int = 224, count: int = 2048) -> None:
        self.seed, self.count = seed, count
        line = torch.linspace(0, 2 * math.pi, pixels, dtype=torch.float32)
        y, x = torch.meshgrid(line, line, indexing="ij")
        angles = torch.arange(N_CLASSES, dtype=torch.float32) * (math.pi / N_CLASSES)
        self.waves = 8 * (x * angles.cos()[:, None, None] + y * angles.sin()[:, None, None])

    def load(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images and their labels."""
        labels = rows % N_CLASSES
        images = [self._image(row, label) for row, label in zip(rows.tolist(), labels, strict=True)]
        return torch.stack(images), labels

    def _image(self, row: int, label: Tensor) -> Tensor:
        generator = self._generator(row)
        phase = 2 * math.pi * torch.rand(1, generator=generator, dtype=torch.float32)
        noise = torch.randn(3, *self.waves.shape[1:], generator=generator, dtype=torch.float32)
        return (self.waves[label] + phase).sin() + 0.5 * noise

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + number)


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(4, after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(4, after)
        self.around = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(inner)) + self.around(x)).relu()


class Network(nn.Module):
    """A residual network. Its norms are of groups: those of batches depend on the rank's share."""

    def __init__(self, seed: int, dropout: float = 0.0) -> None:
        super().__init__()
        widths = (16, 32, 64, 128)
        self.conv = nn.Conv2d(3, 16, 7, 2, 3, bias=False)
        self.norm = nn.GroupNorm(4, 16)
        self.blocks = nn.Sequential(
            *(Block(before, after, 2) for before, after in zip((16, *widths), widths, strict=False))
        )
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(widths[-1], N_CLASSES)
        # A generator of its own: what else draws random numbers in this process changes nothing.
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu", generator=generator)
        for parameter in self.linear.parameters():
            nn.init.zeros_(parameter)  # no class is likelier than another

    def forward(self, images: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.norm(self.conv(images)).relu(), 3, 2, 1)
        return self.linear(self.dropout(self.blocks(x).mean((2, 3))))
