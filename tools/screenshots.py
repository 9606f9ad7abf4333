"""Pictures of every page of the built book: `python tools/screenshots.py _build/html FOLDER [PAGE …]`.

Desktop and phone, light and dark, whole pages: FOLDER/05_tensor-phone-dark.png. For looking at, by a person.
"""

import sys
import threading
from pathlib import Path

from browser import Browser, executable
from serve import server

SCREENS = {"desktop": 1280, "phone": 390}


def pages(site: Path) -> list[str]:
    """The pages with text in them, as paths under the site."""
    found = sorted([*site.glob("book/*.html"), *site.glob("labs/*.html")])
    return [str(page.relative_to(site)) for page in found]


def main(site: Path, folder: Path, wanted: list[str]) -> None:
    """Take every picture and print its path."""
    if unknown := set(wanted) - {Path(page).stem for page in pages(site)}:
        raise SystemExit(f"{site} has no page {', '.join(sorted(unknown))}: give names such as 05_tensor")
    folder.mkdir(parents=True, exist_ok=True)
    program = executable()
    if program is None:
        raise SystemExit("this needs Chromium or Chrome")
    with server(site, 0) as http, Browser(program) as browser:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        for page in [page for page in pages(site) if not wanted or Path(page).stem in wanted]:
            for screen, width in SCREENS.items():
                for dark in (False, True):
                    path = folder / f"{page.replace('/', '-')[:-5]}-{screen}-{'dark' if dark else 'light'}.png"
                    url = f"http://127.0.0.1:{http.server_address[1]}/{page}"
                    browser.open(url, width, dark=dark).picture(path)
                    print(path)
        http.shutdown()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
