"""A browser without a window, for tests of pages. Skips the file that imports it where there is none."""

import shutil
from contextlib import contextmanager

import pytest

webdriver = pytest.importorskip("selenium.webdriver")

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
needed = pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs chromium and chromedriver")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1360,1000")


@contextmanager
def browsing():
    """A running browser, which notes what pages write to their console."""
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in OPTIONS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    one = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield one
    finally:
        one.quit()
