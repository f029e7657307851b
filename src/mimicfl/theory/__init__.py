"""Sections III to V of the paper, applied: certified learning rates, constants of a problem, and bounds for measured runs."""
