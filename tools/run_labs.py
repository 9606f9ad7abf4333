"""Run labs from top to bottom and write their outputs in place: `python tools/run_labs.py labs/05_tensor.ipynb …`.

Shows the cell it is at, and stops at the first that fails, with its traceback; that lab's file stays as it was.
"""

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


class Runner(NotebookClient):
    """A client that says where it is, on one line."""

    def note(self, cell: nbformat.NotebookNode, cell_index: int) -> None:
        print(f"\r{self.name}  cell {cell_index + 1} of {len(self.nb.cells)}", end="", flush=True)


def run(path: Path) -> None:
    """Execute one notebook and write it back."""
    notebook = nbformat.read(path, as_version=4)
    runner = Runner(notebook, timeout=120, resources={"metadata": {"path": str(path.parent)}}, record_timing=False,
                    coalesce_streams=True)
    runner.name = path.name
    runner.on_cell_start = runner.note
    start = time.perf_counter()
    runner.execute()
    print(f"\r{path.name}  {time.perf_counter() - start:.0f} s{' ' * 20}")
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day, of some earlier tool
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for lab in sys.argv[1:]:
        try:
            run(Path(lab))
        except CellExecutionError as error:
            raise SystemExit(f"\n{error}") from None
