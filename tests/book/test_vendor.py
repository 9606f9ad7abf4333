"""The vendored scripts are the files that the manifest names, and nothing else lies beside them."""

import json
from pathlib import Path

import pytest
from refresh_vendor import VENDOR, sha256

HOME = Path(__file__).parents[2] / VENDOR
SCRIPTS = json.loads((HOME / "manifest.json").read_text())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script["folder"])
def test_files_are_those_of_the_manifest(script):
    home = HOME / script["folder"]
    found = {path.relative_to(home).as_posix(): sha256(path) for path in home.rglob("*") if path.is_file()}
    assert found == script["sha256"]
    assert script["licence"] and script["home"].startswith("https://")
    assert all("@" in package.lstrip("@") for package in script["from"]), "each package has its version"


def test_nothing_else_is_vendored():
    assert {path.name for path in HOME.iterdir()} == {"manifest.json", "README.md", *(s["folder"] for s in SCRIPTS)}
