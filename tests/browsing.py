"""A real browser for tests of pages: Debian's chromium without a window, started once, that talks to nobody."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Any]:
    """Chromium with a fresh profile in ``profile``. Ended with all its children when the block is left."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = CHROMIUM or ""
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))
    driver.set_page_load_timeout(120)
    driver.set_script_timeout(120)
    try:
        yield driver
    finally:
        driver.quit()


def look_at(driver: Any, page: Path, *, width: int = 1280, height: int = 900, theme: str = "") -> None:
    """Opens a page in a window of this size; ``theme`` is what the reader's system prefers, and nothing glides."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    prefers = [{"name": "prefers-color-scheme", "value": theme}, {"name": "prefers-reduced-motion", "value": "reduce"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": prefers})
    driver.get("about:blank")
    driver.get(page.resolve().as_uri())


def shoot(driver: Any, to: Path, *, whole: bool = True) -> None:
    """A picture of the page, or of what is seen of it."""
    import base64

    told = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
    to.write_bytes(base64.b64decode(told["data"]))


def complaints(driver: Any) -> list[str]:
    """What the console has said since the last time that was more than information."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def requests(driver: Any) -> list[str]:
    """What was asked of the network, or of the disk, since the last time: the page itself too."""
    told = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [each["params"]["request"]["url"] for each in told if each["method"] == "Network.requestWillBeSent"]
