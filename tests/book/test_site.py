"""The built book: complete, and asking for nothing outside. Read from its files, and watched in a browser."""

import re
from html.parser import HTMLParser
from urllib.parse import urlsplit

import pytest

LOADS = {"script": "src", "img": "src", "source": "src", "iframe": "src", "audio": "src", "video": "src",
         "embed": "src", "object": "data", "image": "href", "use": "href"}
LINKS = {"stylesheet", "icon", "preload", "prefetch", "modulepreload", "preconnect", "dns-prefetch", "manifest"}
OUTSIDE = re.compile(r"(?:https?:)?//[\w.-]+\.\w+")


class Loaded(HTMLParser):
    """What a page loads by itself: addresses in tags, and the texts of its inline scripts and styles."""

    def __init__(self, html):
        super().__init__()
        self.addresses, self.inline, self.reading = [], [], False
        self.feed(html)

    def handle_starttag(self, tag, pairs):
        given = dict(pairs)
        self.reading = tag == "style" or (tag == "script" and "json" not in given.get("type", ""))
        if tag == "link" and LINKS & set(given.get("rel", "").split()):
            self.addresses.append(given["href"])
        if given.get(LOADS.get(tag)):
            self.addresses.append(given[LOADS[tag]])

    def handle_endtag(self, tag):
        self.reading = False

    def handle_data(self, data):
        if self.reading:
            self.inline.append(data)


def outside(html):
    """Addresses of other sites that a page loads."""
    page = Loaded(html)
    return [a for a in page.addresses if OUTSIDE.match(a)] + [a for text in page.inline for a in OUTSIDE.findall(text)]


def imported(css):
    """Addresses of other sites that a style sheet loads."""
    css = re.sub(r"/\*.*?\*/", "", css, flags=re.S)
    return [a for a in re.findall(r"""(?:url\(|@import\s)\s*['"]?([^'")]+)""", css) if OUTSIDE.match(a)]


def written(site):
    """The pages, without the templates that themes leave in _static."""
    return sorted(page for page in site.rglob("*.html") if "_static" not in page.parts)


def test_pages_load_from_their_own_site_only(site):
    assert len(written(site)) >= 5
    for page in written(site):
        assert outside(page.read_text(encoding="utf-8")) == [], page.name
    for style in site.rglob("*.css"):
        assert imported(style.read_text(encoding="utf-8")) == [], style.name


def test_what_pages_load_is_there(site):
    for page in written(site):
        for address in Loaded(page.read_text(encoding="utf-8")).addresses:
            if not address.startswith("data:"):
                assert (page.parent / urlsplit(address).path).exists(), f"{page.name} loads {address}"


@pytest.mark.parametrize(("html", "found"), [
    ('<script src="https://cdn.x.org/a.js"></script>', ["https://cdn.x.org"]),
    ('<link rel="preload stylesheet" href="//fonts.x.org/css">', ["//fonts.x.org"]),
    ('<script>fetch("https://api.x.org/v1")</script>', ["https://api.x.org"]),
    ('<img src="http://x.org/a.png">', ["http://x.org"]),
    ('<a href="https://x.org">x</a><script src="_static/a.js"></script>', []),
    ('<script type="application/json">{"schema": "https://x.org"}</script><p>https://x.org</p>', []),
])
def test_a_page_that_loads_from_outside_is_seen(html, found):
    assert [OUTSIDE.match(address)[0] for address in outside(html)] == found
    assert imported("@import 'https://x.org/a.css'; a {background: url(//y.org/b.png)}") == [
        "https://x.org/a.css", "//y.org/b.png"]


def test_no_sources_leak(site):
    assert not (site / "_sources").exists()
    assert not list(site.rglob("*.ipynb")) and not list(site.rglob("*.md.txt"))


def pages_of(site):
    return sorted(str(p.relative_to(site)) for p in site.rglob("*.html") if p.parent.name in ("book", "labs"))


@pytest.mark.more
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_are_whole_in_a_browser(site, serve_folder, browser, width):
    home = serve_folder(site)
    for name in pages_of(site):
        page = browser.open(f"{home}/{name}", width=width)
        assert page.errors == [], name
        assert [url for url in page.requests if not url.startswith((home, "data:", "blob:"))] == [], name
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), f"{name} is wider than {width} pixels"
        assert page.run("[...document.images].every(i => i.naturalWidth > 0 && i.alt !== null)"), name
        formulas, typeset = page.run(
            "[document.querySelectorAll('.math').length, document.querySelectorAll('mjx-container').length]")
        assert typeset >= formulas, f"{name}: {typeset} of {formulas} formulas are typeset"


def test_the_theme_follows_the_reader(site, serve_folder, browser):
    home = serve_folder(site)
    shade = "getComputedStyle(document.body).backgroundColor"
    light, dark = (browser.open(f"{home}/book/index.html", dark=dark).run(shade) for dark in (False, True))
    assert light == "rgb(255, 255, 255)"
    assert sum(map(int, re.findall(r"\d+", dark)[:3])) < 120
