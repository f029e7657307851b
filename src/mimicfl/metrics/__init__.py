"""Measurements of a run and their storage: evaluation, diagnostics, history and the run folder."""
