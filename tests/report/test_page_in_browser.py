"""The page in a real browser: it shows what it should, fits its window, and sends no request."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from matplotlib.image import imread

from clusterprof.report.page import render
from tests.evaluation.examples import METHODS, every_run, needle_run, record, samples_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium; install one to open the page in it"),
]
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)  # fmt: skip
HEIGHT = 4000
LONG = "unbreakable" * 30


def browse(folder: Path, address: str, *flags: str) -> str:
    """Open an address in a browser that has never run before; its standard output."""
    assert BROWSER is not None
    profile = folder / "profile"
    shutil.rmtree(profile, ignore_errors=True)
    command = [BROWSER, *QUIET, f"--user-data-dir={profile}", *flags, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All benchmarks, every method, and names without a place to break them."""
    runs = list(every_run(METHODS[:2]).items())
    runs[0] = ("needle", list(needle_run(repeats=1)))
    awkward = [
        record(method=f"snapkv ({LONG[:80]})", prompt="long"),
        record(bench="samples", prompt=LONG[:200], text=LONG * 3, references=(LONG,), scores={}),
    ]
    runs += [("awkward", awkward), (f"{LONG}.jsonl", list(samples_run()))]
    path = tmp_path_factory.mktemp("page") / "report.html"
    # What is folded up has to fit, too.
    path.write_text(render(runs).replace("<details>", "<details open>"), encoding="utf-8")
    return path


def test_the_browser_reads_it_as_it_was_written(page: Path, tmp_path: Path) -> None:
    seen = browse(tmp_path, page.as_uri(), "--dump-dom")
    written = page.read_text(encoding="utf-8")
    for tag in ("table", "svg", "tr", "td", "section", "figure"):
        assert len(re.findall(rf"<{tag}\b", seen)) == len(re.findall(rf"<{tag}\b", written)) > 0
    assert '<h4 class="title">Share of right answers (higher is better)</h4>' in seen
    assert 'scope="row" class="name">streaming_llm</th>' in seen


def requested(log: Path) -> set[str]:
    """Where the page asked for anything, by the browser's own log; what the browser itself wants has no origin."""
    events = json.loads(log.read_text(encoding="utf-8"))["events"]
    asked = [event["params"] for event in events if "initiator" in event.get("params", {})]
    addresses = {it["url"] for it in asked if it["initiator"] != "not an origin"}
    return {urlsplit(address).netloc for address in addresses if not address.startswith(("file:", "data:"))}


def test_no_request_leaves_it(page: Path, tmp_path: Path) -> None:
    log = tmp_path / "net.json"
    browse(tmp_path, page.as_uri(), f"--log-net-log={log}", "--dump-dom")
    assert requested(log) == set()


def test_a_page_that_asks_for_something_would_be_noticed(tmp_path: Path) -> None:
    leaking = tmp_path / "leaking.html"
    leaking.write_text('<img src="http://127.0.0.1:9/leak.png">', encoding="utf-8")
    log = tmp_path / "net.json"
    browse(tmp_path, leaking.as_uri(), f"--log-net-log={log}", "--dump-dom")
    assert "127.0.0.1:9" in requested(log)


def test_the_policy_stops_what_was_smuggled_in(page: Path, tmp_path: Path) -> None:
    smuggled = (
        '<img src="http://127.0.0.1:9/x.png"><link rel="stylesheet" href="http://127.0.0.1:9/x.css">'
        '<script>document.title = "run"</script>'
    )
    copy = tmp_path / "smuggled.html"
    copy.write_text(
        page.read_text(encoding="utf-8").replace("<footer>", f"{smuggled}<footer>"), encoding="utf-8"
    )
    log = tmp_path / "net.json"
    seen = browse(tmp_path, copy.as_uri(), f"--log-net-log={log}", "--dump-dom")
    assert "127.0.0.1:9" not in requested(log)
    assert "<title>run" not in seen


@pytest.mark.parametrize("width", [1280, 500])
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_it_is_drawn_light_or_dark(page: Path, tmp_path: Path, mode: str, width: int) -> None:
    picture = tmp_path / "page.png"
    scheme = "--blink-settings=preferredColorScheme=" + ("0" if mode == "dark" else "1")
    browse(tmp_path, page.as_uri(), f"--window-size={width},{HEIGHT}", f"--screenshot={picture}", scheme)
    pixels = (imread(picture)[..., :3] * 255).round().astype(int)
    assert pixels.shape[:2] == (HEIGHT, width)
    background = pixels[0, 0]
    assert (background.mean() > 200) == (mode == "light")
    assert len(np.unique(pixels @ (1 << 16, 1 << 8, 1))) > 200
    drawn = (abs(pixels - background) > 25).any(axis=-1)
    assert 0.02 < drawn.mean() < 0.6
    # Nothing is cut off at the right.
    assert not drawn[:, -8:].any()


@pytest.mark.parametrize("width", [1280, 400, 320])
def test_nothing_makes_it_wider_than_its_window(page: Path, tmp_path: Path, width: int) -> None:
    frame = tmp_path / "frame.html"
    measure = "document.title = page.contentDocument.documentElement.scrollWidth"
    size = f'style="border: 0" width="{width}" height="800"'
    html = f'<iframe id="page" src="{page.as_uri()}" {size} onload="{measure}"></iframe>'
    frame.write_text(html, encoding="utf-8")
    seen = browse(tmp_path, frame.as_uri(), "--allow-file-access-from-files", "--dump-dom")
    found = re.search(r"<title>(\d+)</title>", seen)
    assert found is not None
    assert int(found[1]) <= width
