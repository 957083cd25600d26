"""A small residual network that classifies images."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
    """A residual network with group norms: batch norms would depend on the rank's share."""

    def __init__(self, seed: int, n_classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        widths = (16, 32, 64, 128)
        self.conv = nn.Conv2d(3, 16, 7, 2, 3, bias=False)
        self.norm = nn.GroupNorm(4, 16)
        self.blocks = nn.Sequential(
            *(Block(before, after, 2) for before, after in zip((16, *widths), widths, strict=False))
        )
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(widths[-1], n_classes)
        # A generator of its own: what else draws random numbers in this process changes nothing.
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu", generator=generator)
        for parameter in self.linear.parameters():
            nn.init.zeros_(parameter)  # no class is likelier than another
        for block in self.blocks:
            nn.init.zeros_(block.norm2.weight)  # else rounding grows much faster

    def forward(self, images: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.norm(self.conv(images)).relu(), 3, 2, 1)
        return self.linear(self.dropout(self.blocks(x).mean((2, 3))))
