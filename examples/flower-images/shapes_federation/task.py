"""The model and the images. Replace them by your own."""

from pathlib import Path

import numpy as np
import torch
from flwr.app import Context
from PIL import Image
from torch import nn

CLASSES = ["circle", "cross", "square"]  # the same on every node, even if it lacks some of them
SIZE = 24


class Net(nn.Module):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(),
        )  # fmt: skip
        self.classifier = nn.Linear(32 * 9, len(CLASSES))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the classifier."""
        return self.body(x)

    def head(self, h: torch.Tensor) -> torch.Tensor:
        """Return the logits of features."""
        return self.classifier(h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.head(self.features(x))


def read(folder: str) -> tuple[np.ndarray, np.ndarray]:
    """Read `<folder>/<class>/*.png` and return the images, uint8 [n, 3, SIZE, SIZE], and their classes."""
    files = [(path, label) for label, name in enumerate(CLASSES) for path in sorted(Path(folder, name).glob("*.png"))]
    if not files:
        raise FileNotFoundError(f"no images in {folder}/<class>/*.png, for the classes {', '.join(CLASSES)}")
    images = [np.asarray(Image.open(path).convert("RGB").resize((SIZE, SIZE))) for path, _ in files]
    return np.stack(images).transpose(0, 3, 1, 2).copy(), np.array([label for _, label in files])


def node_data(context: Context) -> tuple[np.ndarray, np.ndarray]:
    """Return this node's own images, from the folder `data` of its config."""
    return read(str(context.node_config["data"]))


def server_data(context: Context) -> tuple[np.ndarray, np.ndarray]:
    """Return the server's test images."""
    return read(str(context.run_config["test-data"]))
