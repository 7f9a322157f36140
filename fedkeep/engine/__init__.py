"""The runtimes: they call a method's hooks and never ask for its name."""

from fedkeep.engine.rounds import Simulation
from fedkeep.engine.settings import Settings
from fedkeep.engine.simulate import simulate

__all__ = ["Settings", "Simulation", "simulate"]
