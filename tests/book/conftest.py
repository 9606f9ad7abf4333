"""The built book, served, and a browser to look at it."""

import subprocess
import sys
import threading
from io import StringIO
from pathlib import Path

import pytest
from browser import Browser, executable
from serve import server
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

ROOT = Path(__file__).parents[2]
BUILD = """
import sys
sys.modules["torch"] = None    # importing torch raises
from jupyter_book.cli.main import main
main(["build", ".", "-W", "--keep-going", "--all", "--path-output", sys.argv[1]])
"""


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the book, built with warnings as errors and with no torch to import."""
    out = tmp_path_factory.mktemp("book")
    run = subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=ROOT, capture_output=True, text=True)
    said = [line for line in run.stderr.splitlines() if "WARNING" in line or "ERROR" in line or "Error" in line]
    assert run.returncode == 0, "\n".join(said)
    return out / "_build" / "html"


@pytest.fixture(scope="session")
def serve_folder():
    """`serve_folder(folder)`: the address where it is served until the tests end."""
    running = []

    def serve(folder):
        running.append(server(folder, 0))
        threading.Thread(target=running[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{running[-1].server_address[1]}"

    yield serve
    for each in running:
        each.shutdown()
        each.server_close()


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium."""
    program = executable()
    if program is None:
        pytest.skip("no Chromium here: the built pages are not watched")
    with Browser(program) as opened:
        yield opened


@pytest.fixture
def build(tmp_path, request):
    """`build(text)`: a page as HTML, and the warnings of its build, with the `EXTENSIONS` that the test file names."""
    (tmp_path / "conf.py").write_text(f"extensions = {request.module.EXTENSIONS}\nnb_execution_mode = 'off'\n")

    def of(text):
        (tmp_path / "index.md").write_text(text)
        warnings, out = StringIO(), tmp_path / "out"
        with patch_docutils(), docutils_namespace():
            Sphinx(tmp_path, tmp_path, out, tmp_path / "trees", "html", status=StringIO(), warning=warnings).build()
        return (out / "index.html").read_text(), warnings.getvalue()

    return of
