"""Takes pictures of the page of `kvedge serve` in three sizes, with the packaged model and the default method.

    .venv/bin/python tests/page_pictures.py docs/images

`test_page_looks.py` takes the same pictures, and checks their answers.
"""

import os
import sys
from pathlib import Path

from browser import browsing
from server import SCENES, serving
from webpage import Page

SIZES = {"page.png": (1400, 900), "page-900.png": (900, 900), "page-390.png": (390, 844)}
PHONE = 390
# each scene is a conversation; the pictures show the last scene
ASKED = {3: ["Describe the image."], 0: ["What is the code?", "Where is the pink circle?"]}
TOP = "document.getElementById('log').scrollTop = 0; document.activeElement.blur();"
SETTLED = "return document.getElementById('private').textContent.length > 1 && !document.getAnimations().length"


def show(driver, width, height, dark=False):
    """Sets the window's width and height in pixels. A window up to PHONE wide is a phone with a touch screen."""
    phone = width <= PHONE
    size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": phone})
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def take(driver, url, folder):
    """Writes the pictures. Returns {scene: {question: answer}}."""
    said = {}
    page = Page(driver, url).ready()
    for scene, questions in ASKED.items():
        page.get("new").click()
        page.attach(SCENES[scene])
        said[scene] = {question: page.ask(question) for question in questions}
    for name, (width, height) in SIZES.items():
        show(driver, width, height)
        driver.refresh()
        page.ready()
        driver.execute_script("document.querySelector('#conversations .title').click()")
        page.until(lambda: page.all(".user img"))
        page.press("Show them", 0)
        driver.execute_script(TOP)
        page.until(lambda: driver.execute_script(SETTLED))
        driver.save_screenshot(str(Path(folder) / name))
    return said


def main():
    """Starts a server and takes the pictures."""
    with serving(dict(os.environ)) as server, browsing() as driver:
        print(take(driver, server.url, sys.argv[1]))


if __name__ == "__main__":
    main()
