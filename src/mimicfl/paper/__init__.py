"""The paper's experiments as declarations, the numbers it publishes, and records of our runs."""
