"""What a run measures and keeps: evaluation, history, and the run folder."""
