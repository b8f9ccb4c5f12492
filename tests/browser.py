"""A headless browser for tests of pages. Without selenium, the test file that imports this module is skipped."""

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
    """Yields a running browser that records the console messages of pages."""
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
