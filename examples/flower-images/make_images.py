"""Draw images for two nodes and a server: `python make_images.py images`. Each node gets two of the three shapes."""

import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

COUNTS = {
    "node-0": {"circle": 40, "cross": 40},
    "node-1": {"cross": 20, "square": 60},
    "server": {"circle": 20, "cross": 20, "square": 20},
}


def draw(shape: str, rng: random.Random) -> Image.Image:
    """Draw one shape, with a random place, size and colour."""
    image = Image.new("RGB", (24, 24), tuple(rng.randrange(60) for _ in range(3)))
    pen, colour = ImageDraw.Draw(image), tuple(rng.randrange(150, 256) for _ in range(3))
    x, y, r = rng.randrange(7, 17), rng.randrange(7, 17), rng.randrange(4, 7)
    if shape == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif shape == "square":
        pen.rectangle((x - r, y - r, x + r, y + r), fill=colour)
    else:
        pen.line((x - r, y - r, x + r, y + r), fill=colour, width=3)
        pen.line((x - r, y + r, x + r, y - r), fill=colour, width=3)
    return image


def main(target: Path) -> None:
    """Draw all images into this folder."""
    rng = random.Random(0)
    for owner, counts in COUNTS.items():
        for shape, count in counts.items():
            folder = target / owner / shape
            folder.mkdir(parents=True, exist_ok=True)
            for k in range(count):
                draw(shape, rng).save(folder / f"{k:03d}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "images"))
