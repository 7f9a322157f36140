"""What leaves fedkeep for other programs and for print: tables of every figure, and plots."""

from fedkeep.export.figures import COLUMNS, long, wide
from fedkeep.export.files import write

__all__ = ["COLUMNS", "long", "wide", "write"]
