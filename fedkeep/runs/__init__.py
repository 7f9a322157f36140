"""Run folders: writing, reading and resuming them, and the history of a run."""
