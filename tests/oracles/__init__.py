"""One module for each method of the registry: `ORACLE`, a plain torch loop of its paper, and `CASES`, hyperparameters.

The oracles take the plans (which examples, in which order) from fedkeep and nothing else: `torch.optim.SGD`, modules
copied per client, ordinary Python.
"""
