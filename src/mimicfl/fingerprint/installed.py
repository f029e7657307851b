"""Which files belong to installed libraries: their code is identified by name, the user's own code by content."""

import sysconfig
from pathlib import Path

INSTALLED = tuple({str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_installed(file: str | Path | None) -> bool:
    return file is not None and str(Path(file).resolve()).startswith(INSTALLED)
