"""The paper's experiments as data, the numbers it prints beside them, and what came out when they were run here."""
