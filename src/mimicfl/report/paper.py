from ..paper.verdicts import value
def cell_value(cell, records, seeds, scale=1.0):
    v = value(cell, records, seeds, scale)
    return None if v is None else (v.mean / 100, None if v.std is None else v.std / 100)
def published_text(study, algorithm, column):
    found = study.published.get(algorithm, {}).get(column)
    return "" if found is None else f"{found[0]:.2f}" + (f" ± {found[1]:.2f}" if found[1] is not None else "")
