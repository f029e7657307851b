"""Accuracies published in the paper, in percent: (mean, standard deviation), or None where it gives no standard deviation."""

Published = dict[str, dict[str, tuple[float, float | None]]]  # algorithm -> column -> value


def _table(columns: str, **rows: str) -> Published:
    """Parse a table such as `_table("10%, 30%", mimic="72.22+-5.28, 74.86+-4.44")`."""
    heads = [head.strip() for head in columns.split(",")]
    return {name: dict(zip(heads, map(_value, text.split(",")), strict=True)) for name, text in rows.items()}


def _value(text: str) -> tuple[float, float | None]:
    mean, _, std = text.partition("+-")
    return float(mean), float(std) if std else None


TABLE_3 = _table(
    "20, 50, 100",
    fedavg="69.39, 68.42, 68.21",
    fedprox="72.67, 67.44, 64.74",
    scaffold="73.46, 72.30, 68.7",
    mifa="72.92, 72.82, 72.20",
    mimic="75.89, 74.86, 74.71",
)
TABLE_4_FMNIST = _table(
    "10%, 30%, 50%",
    fedavg="64.71+-2.26, 69.22+-6.19, 71.31+-1.09",
    fedprox="66.91+-7.24, 69.43+-5.05, 72.91+-1.00",
    scaffold="63.77+-4.66, 73.18+-3.74, 71.88+-0.25",
    mifa="68.58+-6.45, 73.43+-5.61, 73.24+-0.41",
    mimic="72.22+-5.28, 74.86+-4.44, 74.24+-1.31",
)
TABLE_4_CIFAR10 = _table(
    "10%, 30%, 50%",
    fedavg="42.03+-8.48, 51.63+-6.68, 52.21+-6.49",
    fedprox="48.12+-10.62, 50.08+-1.99, 59.23+-1.56",
    scaffold="38.88+-4.21, 56.21+-9.22, 53.59+-0.63",
    mifa="52.69+-2.15, 55.62+-6.10, 56.14+-3.33",
    mimic="56.21+-4.70, 60.07+-2.87, 60.59+-1.52",
)
TABLE_5 = _table(
    "2, 5, 8, 10",
    fedavg="30.52, 77.76, 81.59, 82.10",
    fedprox="36.66, 77.74, 81.22, 81.96",
    scaffold="37.75, 78.15, 82.00, 82.74",
    mifa="50.37, 77.06, 81.84, 82.04",
    mimic="52.91, 78.44, 82.16, 82.93",
)
NO_DROPOUTS_FMNIST = _table("nobody drops out", fedavg="76.82")
NO_DROPOUTS_CIFAR10 = _table("nobody drops out", fedavg="62.48")
