"""The pages in a real browser: empty console, every picture present, no overflow, light and dark.

The pages forbid scripts, so a copy of each with a script added reports its sizes to an enclosing page.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest

from credibly import report
from tabular import facts_of

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser found: none of {', '.join(NAMES)} is installed")

WIDTHS = (400, 1400)
POLICY = re.compile(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>")
REPORT = """<script>
addEventListener("load", () => {
  const seen = document.documentElement, body = getComputedStyle(document.body);
  const over = e => !e.closest(".scroll, svg") && e.getBoundingClientRect().right > innerWidth + 1;
  const box = e => { const r = e.getBoundingClientRect(); return [r.width, r.height, r.right]; };
  const outside = [...document.querySelectorAll("main *")].filter(over);
  parent.postMessage({
    name: NAME, width: innerWidth, scroll: seen.scrollWidth,
    pictures: [...document.querySelectorAll("figure svg")].map(box),
    marks: [...document.querySelectorAll("figure svg")].map(e => e.querySelectorAll("path, use, image, text").length),
    outside: outside.map(e => e.tagName + "." + e.className),
    paper: body.backgroundColor, ink: body.color,
    texts: [...new Set([...document.querySelectorAll("figure svg text")].map(e => getComputedStyle(e).fill))],
  }, "*");
});
</script></body>"""
# The listener comes first: a frame may finish before the rest of the page is parsed.
AROUND = """<!doctype html><body><pre id="found">[]</pre><script>
const all = [];
addEventListener("message", e => {
  all.push(e.data);
  document.getElementById("found").textContent = JSON.stringify(all);
});
</script>%s</body>"""


def run(page, *options: str) -> subprocess.CompletedProcess[str]:
    """Open a page in the browser; its document goes to stdout, its log to stderr."""
    profile = page.parent / "profile"
    command = [
        str(BROWSER),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={profile}",
    ]
    command += [
        "--enable-logging=stderr",
        "--v=0",
        "--virtual-time-budget=20000",
        "--dump-dom",
        *options,
        page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def frames(names, width: int) -> str:
    return "".join(f'<iframe src="{name}" width="{width}" height="900" style="border:0"></iframe>' for name in names)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages by file name, each written next to a copy that reports its sizes."""
    pairs = (
        ("diabetes", "hmc"),
        ("breast_cancer", "ensemble"),
        ("diabetes", "bbb"),
        ("wine", "map"),
        ("plane", "ensemble"),
        ("moons", "hmc"),
    )
    fits = {f"{name}-{method}.html": facts_of(name, method) for name, method in pairs}
    made = {name: report.fit_page(facts) for name, facts in fits.items()}
    made["compare.html"] = report.compare_page({name: fits[f"diabetes-{name}.html"] for name in ("hmc", "bbb")})
    folder = tmp_path_factory.mktemp("pages")
    for name, page in made.items():
        text = report.write(page, folder / name).read_text()
        assert POLICY.search(text)
        copy = POLICY.sub("", text).replace("</body>", REPORT.replace("NAME", json.dumps(name)))
        (folder / f"copy-{name}").write_text(copy)
    return folder, made


@pytest.fixture(scope="module", params=["light", "dark"])
def seen(request, pages):
    """What every copy reports, by name and width, in one colour scheme."""
    folder, made = pages
    around = folder / f"{request.param}.html"
    around.write_text(AROUND % "".join(frames([f"copy-{name}" for name in made], width) for width in WIDTHS))
    out = run(
        around, "--window-size=1600,1200", f"--blink-settings=preferredColorScheme={int(request.param == 'light')}"
    ).stdout
    found = json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', out, re.DOTALL).group(1)))
    assert {(one["name"], one["width"]) for one in found} == {(name, width) for name in made for width in WIDTHS}
    return request.param, {(one["name"], one["width"]): one for one in found}


def test_nothing_on_the_console(pages):
    folder, made = pages
    around = folder / "console.html"
    around.write_text(f"<!doctype html><body>{frames(made, 900)}</body>")
    assert [line for line in run(around).stderr.splitlines() if "CONSOLE" in line] == []


def test_an_error_would_be_detected(pages):
    folder, made = pages
    text = (folder / next(iter(made))).read_text()
    (folder / "broken.html").write_text(text.replace("</body>", "<script>1</script></body>"))
    around = folder / "fault.html"
    around.write_text(f"<!doctype html><body>{frames(['broken.html'], 900)}</body>")
    log = [line for line in run(around).stderr.splitlines() if "CONSOLE" in line]
    assert log
    assert "Content Security Policy" in log[0]


def test_every_picture_is_present(pages, seen):
    for (name, width), one in seen[1].items():
        expected = [picture for section in pages[1][name].sections for picture in section.pictures]
        assert len(one["pictures"]) == len(expected) > 2, name
        for (wide, high, right), marks in zip(one["pictures"], one["marks"]):
            assert min(wide, high) > 100, (name, width)
            assert right <= width, (name, width)
            assert marks > 10, (name, width)


def test_nothing_overflows(seen):
    for place, one in seen[1].items():
        assert one["scroll"] <= one["width"], place
        assert one["outside"] == [], place


def test_text_contrast(seen):
    scheme, found = seen
    for one in found.values():
        paper, ink = (brightness(one[key]) for key in ("paper", "ink"))
        assert (paper > 230 and ink < 60) if scheme == "light" else (paper < 40 and ink > 200)
        # Text in a picture has the page's colour, except on a coloured background, which is light in either scheme.
        assert one["ink"] in one["texts"]
        assert set(one["texts"]) <= {one["ink"], "rgb(34, 34, 34)"}


def brightness(colour: str) -> float:
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / 3
