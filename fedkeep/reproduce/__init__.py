"""Every paper's table as a command: `fedkeep reproduce`. The tables are files in `experiments/`."""
