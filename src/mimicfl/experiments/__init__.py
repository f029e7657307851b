"""Experiments described by settings: one run, a comparison, a grid from a file, on one machine or on a cluster."""
