"""The report in a real browser without a window: no errors, no requests, and its script runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from elastic_ext.report.load import find_places, gather
from elastic_ext.report.page import page
from tests.support.run_profiles import START, write_job

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_BROWSER = next((found for name in _NAMES if (found := shutil.which(name))), None)
_POLICY = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'\">"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(_BROWSER is None, reason=f"none of {', '.join(_NAMES)} is installed"),
]


def opened(file: Path, folder: Path, *options: str) -> tuple[str, list[str]]:
    """The page as it is once its scripts have run, and what stands on the browser's console.

    The page's own policy forbids every request: one that is tried stands there too.
    """
    assert _BROWSER is not None
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
    ]
    command = [_BROWSER, *flags, f"--user-data-dir={folder}", "--enable-logging=stderr", *options, file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize("scheme", ["", "--force-dark-mode"], ids=["light", "dark"])
def test_page_has_no_errors_asks_for_nothing_and_its_script_runs(tmp_path: Path, scheme: str) -> None:
    write_job(tmp_path / "run", 3, 1800.0, slow_rank=1)
    record = gather(find_places(tmp_path / "run"), None, lambda num_bytes: None)
    file = tmp_path / "report.html"
    file.write_text(page(record, made_at=START, version="1.2.3"))
    found, console = opened(file, tmp_path / "profile", "--dump-dom", *filter(None, [scheme]))
    assert console == []
    assert found.count('class="cursor"') == found.count('over-time" id="') > 4


def test_the_browser_would_tell_of_requests_and_errors(tmp_path: Path) -> None:
    file = tmp_path / "bad.html"
    body = '<img src="http://127.0.0.1:9/x.png"><script>undefined_name()</script>'
    file.write_text(f"<!DOCTYPE html><html><head>{_POLICY}</head><body>{body}</body></html>")
    _, console = opened(file, tmp_path / "profile", "--dump-dom")
    assert any("Content Security Policy" in line for line in console)
    assert any("undefined_name" in line for line in console)
