"""The tools around the book: the server, the choice of a Python, the exact requirements, running labs."""

import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import nbformat
import pytest
from freeze import exact
from run_labs import run
from serve import server

ROOT = Path(__file__).parents[2]


def test_files_are_served_with_the_types_that_browsers_want(tmp_path, serve_folder):
    for name in ("a.mjs", "b.wasm", "c.js", "index.html"):
        (tmp_path / name).write_text("x")
    home = serve_folder(tmp_path)
    for name, kind in {"a.mjs": "text/javascript", "b.wasm": "application/wasm", "c.js": "text/javascript"}.items():
        with urllib.request.urlopen(f"{home}/{name}") as answer:
            assert answer.headers["Content-Type"] == kind


def test_a_taken_port_is_no_failure(tmp_path):
    with server(tmp_path, 0) as first:
        taken = first.server_address[1]
        with server(tmp_path, taken) as second:
            assert second.server_address[1] not in (0, taken)


def test_ctrl_c_ends_the_server_cleanly(tmp_path):
    (tmp_path / "index.html").write_text("x")
    process = subprocess.Popen([sys.executable, ROOT / "tools" / "serve.py", tmp_path], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    with process:
        assert re.search(r"http://localhost:\d+/", process.stdout.readline())
        process.send_signal(2)
        assert process.wait(timeout=20) == 0
        assert process.stderr.read() == ""


def fake_python(folder, name, version):
    """A command that answers as Python of that version, or that does not run."""
    path = folder / name
    path.write_text("#!/bin/sh\n" + (f"echo {version}\n" if version else "echo 'no such version' >&2; exit 127\n"))
    path.chmod(0o755)


def make_venv(folder, *arguments):
    """Run the script with nothing on the path but `folder` and what the shell needs."""
    path = f"{folder}:/usr/bin:/bin" if not arguments else os.environ["PATH"]
    return subprocess.run(["sh", ROOT / "tools" / "make_venv.sh", folder / "venv", *arguments], capture_output=True,
                          text=True, cwd=folder, env={"PATH": path})


def test_a_python_that_does_not_suit_is_refused_by_its_version(tmp_path):
    fake_python(tmp_path, "old", "3.9")
    run = make_venv(tmp_path, str(tmp_path / "old"))
    assert run.returncode == 1
    assert "is Python 3.9; the book needs 3.11 to 3.13" in run.stderr
    assert not (tmp_path / "venv").exists()


def test_without_a_python_that_suits_all_that_were_found_are_named(tmp_path):
    versions = {"python3.11": "", "python3.12": "", "python3.13": "", "python3": "3.14", "python": "2.7"}
    for name, version in versions.items():
        fake_python(tmp_path, name, version)
    run = make_venv(tmp_path)
    assert run.returncode == 1
    assert "Found: python3 (3.14) python (2.7)." in run.stderr


def test_a_shim_that_does_not_run_is_passed_over(tmp_path):
    fake_python(tmp_path, "python3.11", "")
    fake_python(tmp_path, "python3.12", "3.12")
    said = make_venv(tmp_path)
    assert "Making" in said.stdout and "3.12" in said.stdout


def test_requirements_are_exact_and_complete():
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+(; .+)?", line) for line in lines)
    normal = [re.sub(r"[-_.]+", "-", line).lower() for line in lines]
    asked = [line.split("#")[0].strip() for line in (ROOT / "requirements.in").read_text().splitlines()]
    for wanted in filter(None, asked):
        assert re.sub(r"[-_.]+", "-", wanted).lower() in normal


def test_a_freeze_becomes_requirements():
    freeze = "pip==25.0\ntorch==2.13.0+cpu\n-e git+https://x#egg=shardlab\nshardlab==0.1.0\nAbc==1\n"
    wanted = '# x; y\ntorch==2.13.0  # a; b\nappnope==0.1.4; sys_platform == "darwin"\n'
    assert exact(freeze, wanted).splitlines()[1:] == [
        "Abc==1", 'appnope==0.1.4; sys_platform == "darwin"', "torch==2.13.0"]


@pytest.mark.filterwarnings("ignore")
def test_a_lab_is_run_in_place_without_times_of_day(tmp_path, capsys):
    cell = nbformat.v4.new_code_cell("1 + 1", metadata={"execution": {"iopub.busy": "2026"}})
    path = tmp_path / "lab.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    run(path)
    done = nbformat.read(path, as_version=4).cells[0]
    assert done.outputs[0]["data"]["text/plain"] == "2"
    assert "execution" not in done.metadata
    assert "cell 1 of 1" in capsys.readouterr().out
