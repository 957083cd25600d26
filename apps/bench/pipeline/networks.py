"""The networks that are trained: real shapes, made-up images and texts.

Without dropout and response normalization, which have no parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class Tiny(nn.Module):
    """For trying things out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.hidden = nn.Linear(8 * 4 * 4, 64)
        self.head = nn.Linear(64, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.adaptive_avg_pool2d(self.conv(x).relu(), 4)
        return self.head(self.hidden(x.flatten(1)).relu())


class AlexNet(nn.Module):
    """Caffe's, whose convolutions 2, 4 and 5 have two groups: Krizhevsky et al., 2012."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 96, 11, stride=4)
        self.conv2 = nn.Conv2d(96, 256, 5, padding=2, groups=2)
        self.conv3 = nn.Conv2d(256, 384, 3, padding=1)
        self.conv4 = nn.Conv2d(384, 384, 3, padding=1, groups=2)
        self.conv5 = nn.Conv2d(384, 256, 3, padding=1, groups=2)
        self.fc6 = nn.Linear(256 * 6 * 6, 4096)
        self.fc7 = nn.Linear(4096, 4096)
        self.fc8 = nn.Linear(4096, 1000)

    def forward(self, x: Tensor) -> Tensor:
        pool = nn.functional.max_pool2d
        x = pool(self.conv1(x).relu(), 3, 2)
        x = pool(self.conv2(x).relu(), 3, 2)
        x = self.conv4(self.conv3(x).relu()).relu()
        x = nn.functional.adaptive_avg_pool2d(pool(self.conv5(x).relu(), 3, 2), 6)
        x = self.fc7(self.fc6(x.flatten(1)).relu()).relu()
        return self.fc8(x)


class Vgg16(nn.Module):
    """Configuration D of Simonyan and Zisserman, 2014."""

    def __init__(self) -> None:
        super().__init__()
        features: list[nn.Module] = []
        channels = 3
        for n_convs, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
            for _ in range(n_convs):
                features += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            features.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*features)
        self.fc6 = nn.Linear(512 * 7 * 7, 4096)
        self.fc7 = nn.Linear(4096, 4096)
        self.fc8 = nn.Linear(4096, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.adaptive_avg_pool2d(self.features(x), 7).flatten(1)
        return self.fc8(self.fc7(self.fc6(x).relu()).relu())


class Inception(nn.Module):
    """Four branches side by side."""

    def __init__(self, channels: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        one, three_in, three, five_in, five, pooled = widths
        self.one = nn.Conv2d(channels, one, 1)
        self.three_in = nn.Conv2d(channels, three_in, 1)
        self.three = nn.Conv2d(three_in, three, 3, padding=1)
        self.five_in = nn.Conv2d(channels, five_in, 1)
        self.five = nn.Conv2d(five_in, five, 5, padding=2)
        self.pooled = nn.Conv2d(channels, pooled, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.one(x)
        three = self.three(self.three_in(x).relu())
        five = self.five(self.five_in(x).relu())
        pooled = self.pooled(nn.functional.max_pool2d(x, 3, 1, 1))
        return torch.cat((one, three, five, pooled), 1).relu()


class GoogLeNet(nn.Module):
    """Szegedy et al., 2014, without the two classifiers on the side."""

    _WIDTHS = (
        (64, 96, 128, 16, 32, 32),
        (128, 128, 192, 32, 96, 64),
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
        (256, 160, 320, 32, 128, 128),
        (384, 192, 384, 48, 128, 128),
    )
    _POOLED_AFTER = (1, 6)

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3)
        self.conv2_in = nn.Conv2d(64, 64, 1)
        self.conv2 = nn.Conv2d(64, 192, 3, padding=1)
        channels, parts = 192, []
        for widths in self._WIDTHS:
            parts.append(Inception(channels, widths))
            channels = widths[0] + widths[2] + widths[4] + widths[5]
        self.inceptions = nn.ModuleList(parts)
        self.head = nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        def pool(x: Tensor) -> Tensor:
            return nn.functional.max_pool2d(x, 3, 2, ceil_mode=True)

        x = pool(self.conv1(x).relu())
        x = pool(self.conv2(self.conv2_in(x).relu()).relu())
        for number, inception in enumerate(self.inceptions):
            x = inception(x)
            if number in self._POOLED_AFTER:
                x = pool(x)
        return self.head(x.mean((2, 3)))


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * width)
        self.shortcut: nn.Module = nn.Identity()
        if channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm1(self.conv1(x)).relu()
        out = self.norm2(self.conv2(out)).relu()
        return (self.norm3(self.conv3(out)) + self.shortcut(x)).relu()


class ResNet50(nn.Module):
    """He et al., 2015, with the stride in the 3 by 3 convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(64)
        blocks: list[nn.Module] = []
        channels = 64
        for width, n_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for number in range(n_blocks):
                stride = 2 if width > 64 and number == 0 else 1
                blocks.append(Bottleneck(channels, width, stride))
                channels = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.norm(self.conv(x)).relu(), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


class Block(nn.Module):
    """Attention, then two linear layers."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm1 = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attention_in(self.norm1(x)).unflatten(-1, (3, self.n_heads, -1))
        query, key, value = parts.movedim(2, 0).transpose(2, 3)
        heads = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(heads.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    """GPT-2 small, Radford et al., 2019; the head's weight is the embedding's."""

    vocabulary, context, width = 50257, 1024, 768

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.vocabulary, self.width)
        self.positions = nn.Embedding(self.context, self.width)
        self.blocks = nn.Sequential(*(Block(self.width, 12) for _ in range(12)))
        self.norm = nn.LayerNorm(self.width)
        self.head = nn.Linear(self.width, self.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        return self.head(self.norm(self.blocks(x))).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Network:
    """One row of the table of networks."""

    make: Callable[[], nn.Module]  # makes it
    size: int  # pixels of an image's side, or tokens of a text
    # Limits of other sizes.
    least: int
    most: int = 1024

    @property
    def reads(self) -> str:
        """The kind of its inputs: "images" or "texts"."""
        return "texts" if self.make is Gpt2 else "images"


NETWORKS = {
    "tiny": Network(Tiny, 16, 4),
    "alexnet": Network(AlexNet, 227, 67),
    "vgg16": Network(Vgg16, 224, 32),
    "googlenet": Network(GoogLeNet, 224, 32),
    "resnet50": Network(ResNet50, 224, 32),
    "gpt2": Network(Gpt2, 128, 2, Gpt2.context),
}


def data(name: str, batch: int, size: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return made-up inputs and labels, others on every rank."""
    if NETWORKS[name].reads == "texts":
        text = torch.arange(batch * (size + 1)).reshape(batch, size + 1) * 7919 + rank
        text = text % Gpt2.vocabulary
        return text[:, :-1].contiguous(), text[:, 1:].flatten()
    images = torch.linspace(-1, 1, batch * 3 * size * size).reshape(batch, 3, size, size)
    return images.roll(rank + 1, 0), (torch.arange(batch) + rank) % 1000
