"""How metrics are shown."""

from mimicfl.metrics.columns import PERCENT
from mimicfl.tasks.metrics import BY_NAME


def test_percent_as_the_metrics_declare_it():
    assert {kind().column for kind in BY_NAME.values() if kind.percent} == PERCENT
