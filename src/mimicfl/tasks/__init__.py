"""Tasks: a task determines the loss, how outputs are interpreted, and the metrics.

>>> make_task("token-prediction").metrics[1].column
'test_perplexity'
"""

from .base import LearningTask
from .built_in import Classification, Custom, MultiLabel, Regression, TokenPrediction, make_task
from .metrics import Metric
from .predictions import Predictions

__all__ = ["Classification", "Custom", "LearningTask", "Metric", "MultiLabel", "Predictions", "Regression", "TokenPrediction", "make_task"]
