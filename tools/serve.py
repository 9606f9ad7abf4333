"""Serve a built site on this machine: `python tools/serve.py _build/html`. Ctrl-C ends it.

Port 8000 if it is free, else one that the system picks. Other machines can't reach it.
"""

import argparse
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(SimpleHTTPRequestHandler):
    """Files with the types that browsers insist on, read afresh each time, and no line for each request."""

    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/javascript", ".js": "text/javascript",
                                                                ".wasm": "application/wasm"}

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")  # a page built again is seen at the next reload
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def server(folder: str | Path, port: int = 8000) -> ThreadingHTTPServer:
    """A server for `folder` that is bound and not yet running; on another port where `port` is taken."""
    handler = partial(Handler, directory=str(folder))
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError:
        return ThreadingHTTPServer(("127.0.0.1", 0), handler)


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if not (folder / "index.html").exists():
        raise SystemExit(f"{folder} holds no built site: run `make html`")
    with server(folder) as site:
        try:
            print(f"The book is at http://localhost:{site.server_address[1]}/   (Ctrl-C ends)", flush=True)
            site.serve_forever()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    main()
