"""A page in headless Chromium: what it looks like at a width and colour scheme, and what it complains about."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from html import escape, unescape
from typing import Any

import pytest

_BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --enable-logging=stderr "
    "--dump-dom"
).split()

# The page stands in a frame: windows have a smallest width, frames have none, and a media query sees the frame's.
_FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><body><pre id="seen"></pre>
<iframe id="page" style="width:{width}px;height:800px;border:0" srcdoc="{page}"></iframe><script>
addEventListener("load", () => {{
  const page = document.getElementById("page").contentDocument, root = page.documentElement;
  const all = (selector) => [...page.querySelectorAll(selector)];
  const folded = root.scrollWidth;
  all("details").forEach((part) => part.open = true);
  document.getElementById("seen").textContent = JSON.stringify({{
    sections: all("[id]").map((part) => part.id),
    headings: all("h1, h2").map((part) => part.textContent),
    drawings: all("svg").map((part) => part.getBoundingClientRect().width),
    links: all("a").map((part) => part.getAttribute("href")),
    text: page.body.innerText.length,
    width: root.clientWidth,
    folded: folded,
    unfolded: root.scrollWidth,
    paper: getComputedStyle(page.body).backgroundColor,
  }});
}});
</script></body>"""


@dataclass
class Seen:
    """What the browser made of a page; `console`: lines on its console."""

    facts: dict[str, Any]
    console: list[str]

    def __getattr__(self, name: str) -> Any:
        return self.facts[name]


def look_at(page: str, width: int, dark: bool) -> Seen:
    """Open a page; skips the test without a Chromium, unless PLE_TEST_CHROMIUM=required, as in CI."""
    if _BINARY is None:
        reason = "no Chromium: install the package chromium"
        pytest.fail(reason) if os.environ.get("PLE_TEST_CHROMIUM") == "required" else pytest.skip(reason)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "frame.html"
        file.write_text(_FRAME.format(width=width, page=escape(page)), encoding="utf-8")
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        profile = f"--user-data-dir={folder}/profile"
        command = [_BINARY, *_FLAGS, scheme, profile, f"--window-size={max(width, 800)},900", file.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.S)
    assert found and found.group(1), f"the page was not measured: {done.stderr[-2000:]}"
    return Seen(json.loads(unescape(found.group(1))), [line for line in done.stderr.splitlines() if "CONSOLE" in line])
