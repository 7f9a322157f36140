"""A Flower app as users have them: FedAvg, with a training loop of its own."""
