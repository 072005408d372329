"""Parse a rendered page and check that it is self-contained."""

from __future__ import annotations

import re
from html.parser import HTMLParser

LOADING = {"src", "href", "srcset", "data", "action", "poster", "background", "xlink:href"}
VOID = {"meta", "br", "img", "link", "hr", "input"}


class Reader(HTMLParser):
    """Collect ids, references and addresses to load; check that tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.loads, self.tags, self.open, self.texts = [], [], [], [], []
        self.references = set(re.findall(r"url\(#([^)]+)\)", text))
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for key, value in attrs:
            if key == "id":
                self.ids.append(value)
            if key in LOADING:
                self.loads.append(value)
                if value.startswith("#"):
                    self.references.add(value[1:])

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def check_self_contained(text: str) -> Reader:
    page = Reader(text)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert page.references <= set(page.ids)
    assert all(address.startswith(("#", "data:image/png;base64,")) for address in page.loads)
    assert not {"script", "link", "iframe", "object", "embed"} & set(page.tags)
    assert "@import" not in text
    assert not re.findall(r"https?://", text)
    assert "default-src 'none'" in text
    return page
