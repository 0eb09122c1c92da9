"""A headless Chromium for tests of the page, or a skip that says what is missing."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
# As root Chromium has no sandbox; nothing but our own page is opened.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def chromium() -> str | None:
    """The path of a browser of this machine."""
    names = (os.environ.get("GRAFT_CHROMIUM", ""), *NAMES)
    return next((path for name in names if name and (path := shutil.which(name))), None)


@contextmanager
def launched() -> Iterator[Any]:
    """A browser of playwright's, driven over its own pipe."""
    path = chromium()
    if path is None:
        pytest.skip("NO BROWSER: the page is not tested here. scripts/browser installs Chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()
