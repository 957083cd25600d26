"""Handwritten digits from scikit-learn, and a small convolutional network that reads them."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn


class Digits:
    """1797 images of 8 by 8 pixels: 1437 to train with, 360 to test with, always the same."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu") -> None:
        bunch = load_digits()
        # Pixels are 0 to 16; mean and deviation are 4.9 and 6.
        images = (torch.tensor(bunch.images, dtype=dtype).unsqueeze(1) - 4.9) / 6
        images = images.to(device)
        labels = torch.tensor(bunch.target, dtype=torch.int64, device=device)
        rows = torch.arange(len(labels))
        train, test = train_test_split(rows, test_size=360, stratify=bunch.target, random_state=0)
        self.train, self.train_labels = images[train], labels[train]
        self.test, self.test_labels = images[test], labels[test]


class Network(nn.Module):
    """Three convolutions and two linear layers; each is one layer of the exchange."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.conv3 = nn.Conv2d(32, 64, 3, padding=1)
        self.linear1 = nn.Linear(64 * 2 * 2, 128)
        self.linear2 = nn.Linear(128, 10)
        # A generator of its own: what else draws random numbers in this process changes nothing.
        generator = torch.Generator().manual_seed(seed)
        for layer in self.children():
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
            nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv1(images).relu()
        x = nn.functional.max_pool2d(self.conv2(x).relu(), 2)
        x = nn.functional.max_pool2d(self.conv3(x).relu(), 2)
        return self.linear2(self.linear1(x.flatten(1)).relu())
