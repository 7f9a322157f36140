"""`anchor_gap` against numbers worked out by hand."""

from __future__ import annotations

import torch

from fedkeep.losses import anchor_gap


def test_anchor_gap_by_hand() -> None:
    """Three classes, of which the second is dominant and left out.

    First example:  z = (1, 5, -2), z_g = (0, 9, 2): (1 - 0)^2 + (-2 - 2)^2 = 1 + 16 = 17.
    Second example: z = (3, 0, 1), z_g = (1, 0, 4): (3 - 1)^2 + (1 - 4)^2 = 4 + 9 = 13.
    With every channel the first has (5 - 9)^2 = 16 more, 33; the second 0 more, 13. With none both are 0.
    Means: 17 / 2 = 8.5 and 13 / 2 = 6.5 over two channels, 33 / 3 = 11 over three, 0 over none.
    """
    z = torch.tensor([[1.0, 5.0, -2.0], [3.0, 0.0, 1.0]])
    z_g = torch.tensor([[0.0, 9.0, 2.0], [1.0, 0.0, 4.0]])
    assert anchor_gap(z, z_g, torch.tensor([True, False, True])).tolist() == [17.0, 13.0]
    assert anchor_gap(z, z_g, torch.tensor([1.0, 0.0, 1.0])).tolist() == [17.0, 13.0]
    assert anchor_gap(z, z_g, torch.ones(3)).tolist() == [33.0, 13.0]
    assert anchor_gap(z, z_g, torch.zeros(3)).tolist() == [0.0, 0.0]
    assert anchor_gap(z, z_g, torch.tensor([True, False, True]), "mean").tolist() == [8.5, 6.5]
    assert anchor_gap(z, z_g, torch.ones(3), "mean").tolist()[0] == 11.0
    assert anchor_gap(z, z_g, torch.zeros(3), "mean").tolist() == [0.0, 0.0]


def test_anchor_gap_moves_only_the_channels_it_keeps() -> None:
    """The gradient is 2 (z - z_g) there and 0 elsewhere, even where that logit has left the finite numbers."""
    z = torch.tensor([[1.0, float("inf"), -2.0]], requires_grad=True)
    anchor_gap(z, torch.tensor([[0.0, 0.0, 2.0]]), torch.tensor([True, False, True])).sum().backward()
    assert z.grad is not None
    assert z.grad.tolist()[0][::2] == [2.0, -8.0]
