"""The simulator: the round loop of the paper, and the cohorts that train a round's clients."""
