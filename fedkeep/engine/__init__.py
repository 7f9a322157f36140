"""The runtimes: they call a method's hooks and never ask for its name."""

from fedkeep.engine.rounds import Settings, Simulation, simulate

__all__ = ["Settings", "Simulation", "simulate"]
