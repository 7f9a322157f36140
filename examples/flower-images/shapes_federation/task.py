"""The model and the images: what is yours to change."""

from pathlib import Path

import numpy as np
import torch
from flwr.app import Context
from PIL import Image
from torch import nn

CLASSES = ["circle", "cross", "square"]  # the same on every node, also on one that lacks some of them
SIZE = 24


class Net(nn.Module):
    """A small network; `features` and `head` are only there for methods that look at features (MOON, FedKA)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(),
        )  # fmt: skip
        self.classifier = nn.Linear(32 * 9, len(CLASSES))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the classifier is given."""
        return self.body(x)

    def head(self, h: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.classifier(h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.head(self.features(x))


def read(folder: str) -> tuple[np.ndarray, np.ndarray]:
    """Read `<folder>/<class>/*.png`: images as bytes [n, 3, SIZE, SIZE], and their classes."""
    files = [(path, label) for label, name in enumerate(CLASSES) for path in sorted(Path(folder, name).glob("*.png"))]
    if not files:
        raise FileNotFoundError(f"no images in {folder}/<class>/*.png, for the classes {', '.join(CLASSES)}")
    images = [np.asarray(Image.open(path).convert("RGB").resize((SIZE, SIZE))) for path, _ in files]
    return np.stack(images).transpose(0, 3, 1, 2).copy(), np.array([label for _, label in files])


def node_data(context: Context) -> tuple[np.ndarray, np.ndarray]:
    """Return this node's own images, from the folder its config names."""
    return read(str(context.node_config["data"]))


def server_data(context: Context) -> tuple[np.ndarray, np.ndarray]:
    """Return what the server tests with."""
    return read(str(context.run_config["test-data"]))
