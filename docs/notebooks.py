"""Execute the notebooks and store their outputs: python docs/notebooks.py [NAME ...]. `make docs` does so for all."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
# Which interpreter ran a notebook, and when, would change with every machine.
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}, "language_info": {"name": "python"}}


def executed(file: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a new run, made in `folder`."""
    notebook = nbformat.read(file, as_version=4)
    client = NotebookClient(notebook, timeout=900, kernel_name="python3", record_timing=False, resources={"metadata": {"path": folder}})
    client.execute()
    return notebook


def store(notebook: nbformat.NotebookNode, file: Path) -> None:
    """Write a notebook without what differs from machine to machine."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.output_type != "stream" or output.name == "stdout"]
            for output in cell.outputs:
                output.pop("transient", None)
    nbformat.write(notebook, file)


if __name__ == "__main__":
    import tempfile

    for name in sys.argv[1:] or [file.stem for file in sorted(FOLDER.glob("*.ipynb"))]:
        with tempfile.TemporaryDirectory() as place:
            store(executed(FOLDER / f"{name}.ipynb", Path(place)), FOLDER / f"{name}.ipynb")
        print(f"{name}: executed")
