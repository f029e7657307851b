"""The names of the columns of rows that reports show."""

from ..metrics.columns import head, percent

NAMES = {
    "test_accuracy": "test accuracy (%)",
    "test_loss": "test loss",
    "train_loss": "training loss",
    "distance": "distance to the optimum",
}
OWN_TEST = ("clients_mean", "clients_worst_tenth", "clients_never_seen", "clients_rarest_tenth", "clients_rare", "clients_often")


def axis(column: str) -> str:
    """The name of a column at the axis of a plot."""
    return NAMES.get(column) or head(column) + " (%)" * percent(column)
