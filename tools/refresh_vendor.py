"""Fetch the scripts that built pages load, so that no page asks anything of another site.

`python tools/refresh_vendor.py` reads book/web/vendor/manifest.json, packs each package at the version named there with
the npm client, copies the files named there and writes their checksums back. To update a script, change its version in
the manifest and run this. Needs npm; everything else about the book does not.
"""

import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

VENDOR = Path("book/web/vendor")


def sha256(path: Path) -> str:
    """The checksum of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def unpack(package: str, room: Path) -> Path:
    """Pack `package` ("mathjax@3.2.2") with npm into the folder `room`, unpack it, and return where its files are."""
    out = room / package.replace("/", "_")
    out.mkdir()
    subprocess.run(["npm", "pack", "--silent", package, "--pack-destination", str(out)], check=True)
    (archive,) = out.glob("*.tgz")
    with tarfile.open(archive) as tar:
        tar.extractall(out, filter="data")
    return out / "package"


def copy(source: Path, pattern: str, target: Path) -> list[Path]:
    """Copy what matches `pattern` under `source` to `target`: to that name, or into that folder if several match."""
    found = sorted(source.glob(pattern))
    if not found:
        raise SystemExit(f"{pattern} is not in the package: has its layout changed?")
    copies = [target / path.name if len(found) > 1 else target for path in found]
    for path, to in zip(found, copies, strict=True):
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)
    return copies


def refresh(script: dict, room: Path) -> dict:
    """Fetch one entry of the manifest again; the entry with its new checksums."""
    home = VENDOR / script["folder"]
    shutil.rmtree(home, ignore_errors=True)
    sums = {}
    for package, files in script["from"].items():
        source = unpack(package, room)
        for pattern, target in files.items():
            for path in copy(source, pattern, home / target):
                sums[str(path.relative_to(home))] = sha256(path)
    return {**script, "sha256": dict(sorted(sums.items()))}


def main() -> None:
    """Refresh everything that the manifest names."""
    manifest = VENDOR / "manifest.json"
    scripts = json.loads(manifest.read_text())
    with tempfile.TemporaryDirectory() as room:
        scripts = [refresh(script, Path(room)) for script in scripts]
    manifest.write_text(json.dumps(scripts, indent=2) + "\n")


if __name__ == "__main__":
    main()
