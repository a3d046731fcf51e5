"""Check the built site: every link within it leads to a page, and to a place on it. Run `make docs` first."""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag


class Page(HTMLParser):
    """The links of a page and the places on it."""

    def __init__(self, path):
        super().__init__()
        self.links, self.places = [], {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id" or (tag == "a" and name == "name"):
                self.places.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def broken(site):
    """The links that lead nowhere, with the page they are on."""
    pages = {path: Page(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links:
            if "://" in link or link.startswith(("data:", "mailto:", "javascript:")):
                continue
            address, place = urldefrag(link)
            target = (path.parent / unquote(address.partition("?")[0])).resolve() if address else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (target in pages and unquote(place) not in pages[target].places):
                yield f"{path.relative_to(site)}: {link}"


if __name__ == "__main__":
    site = Path(__file__).parent / "_build" / "html"
    if not site.is_dir():
        sys.exit("there is no site yet; run make docs first")
    found = sorted(set(broken(site.resolve())))
    print("\n".join(found) or f"{len(list(site.rglob('*.html')))} pages, all links within lead somewhere")
    sys.exit(bool(found))
