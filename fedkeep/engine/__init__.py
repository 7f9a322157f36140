"""The runtimes: they call a method's hooks and never ask for its name."""

from fedkeep.engine.settings import Settings
from fedkeep.engine.simulate import simulate
from fedkeep.engine.simulation import Simulation

__all__ = ["Settings", "Simulation", "simulate"]
