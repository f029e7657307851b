"""Check what `make dist` built: python .ci/check_dist.py dist.

The wheel holds all files of the package, every version is the same, and the description has no links that only work in the repository.
"""

import re
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_SHIPPED = ("__pycache__", ".pyc")


def relative_links(text: str) -> list[str]:
    """The targets of links and pictures that are neither absolute nor within the text."""
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z][a-z0-9+.-]*:|#", target, re.IGNORECASE)]


def check(folder: Path) -> list[str]:
    """What is wrong with the distributions in a folder, in words."""
    [wheel], [source] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src/mimicfl/_version.py").read_text())[1]  # type: ignore[index]
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    files = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*") if path.is_file()}
    files = {name for name in files if not any(part in name for part in NOT_SHIPPED) and ".egg-info/" not in name}
    wrong = [f"the wheel lacks {name}" for name in sorted(files - names)]
    wrong += [f"the wheel holds {name}" for name in sorted(names - files) if ".dist-info/" not in name]
    wrong += [f"{file.name} is not version {version}" for file in (wheel, source) if f"-{version}" not in file.name]
    if f"\nVersion: {version}\n" not in metadata:
        wrong.append(f"the metadata does not say version {version}")
    wrong += [f"the description links to {target}, which a package index does not have" for target in relative_links(metadata)]
    if f"\nversion: {version}\n" not in (ROOT / "CITATION.cff").read_text():
        wrong.append(f"CITATION.cff does not say version {version}")
    with tarfile.open(source) as archive:
        shipped = {name.partition("/")[2] for name in archive.getnames()}
    return wrong + [
        f"the source distribution lacks {name}" for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py") if name not in shipped
    ]


if __name__ == "__main__":
    problems = check(Path(sys.argv[1]))
    print("\n".join(problems) or "the distributions are complete")
    sys.exit(bool(problems))
