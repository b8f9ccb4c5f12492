"""Drives the page of `kvedge serve` as a person does."""

import json
from contextlib import contextmanager

from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

OUTSIDE = "http://192.0.2.1/"
CHOOSE = """const one = document.getElementById(arguments[0]);
one.value = arguments[1];
one.dispatchEvent(new Event("input"));"""
PRESS = """const named = (one) => (one.ariaLabel ?? one.textContent) === arguments[0];
[...document.querySelectorAll("button")].filter(named).at(arguments[1]).click();"""
# records the requests of the page and the streams of the server
RECORD = """const plain = window.fetch;
window.sent = [];
window.came = [];
window.fetch = async (path, options) => {
  if (options?.body) window.sent.push(options.body);
  const response = await plain(path, options);
  if (options?.body) response.clone().text().then((text) => window.came.push(text), () => {});
  return response;
};"""


class Page:
    """A page that is open in a browser."""

    def __init__(self, driver, url):
        self.driver = driver
        driver.get(url)

    def get(self, name):
        return self.driver.find_element(By.ID, name)

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def until(self, what, seconds=40):
        try:
            return WebDriverWait(self.driver, seconds, 0.05, [WebDriverException]).until(lambda _: what())
        except WebDriverException as error:
            raise AssertionError(f"{error}; {self.driver.get_log('browser')}") from None

    def ready(self):
        self.until(lambda: self.get("model").get_attribute("textContent"))
        return self

    def attach(self, path):
        before = len(self.all("#attached li"))
        self.get("file").send_keys(str(path))
        self.until(lambda: len(self.all("#attached li")) == before + 1)

    def choose(self, name, value):
        self.driver.execute_script(CHOOSE, name, value)

    def ask(self, text):
        """Sends a question. Returns the answer's text when the answer is complete."""
        before = len(self.all(".assistant .foot .quiet"))
        self.get("text").send_keys(text, Keys.ENTER)
        return self.answered(before + 1)

    def answered(self, n):
        """Waits for n answers. Returns the text of the last answer when it is complete."""
        self.until(lambda: len(self.all(".assistant .foot .quiet")) == n and self.get("send").is_displayed())
        return self.all(".assistant .text")[-1].text

    def says(self, *selectors):
        return [[one.text for one in self.all(selector)] for selector in selectors]

    def press(self, label, number=-1):
        """Clicks a button with this label: by default the last one. Works on buttons that only the pointer shows."""
        self.driver.execute_script(PRESS, label, number)

    def record(self):
        self.driver.execute_script(RECORD)

    def sent(self):
        """Returns the bodies of the requests since `record`."""
        return [json.loads(body) for body in self.driver.execute_script("return window.sent")]


@contextmanager
def opened(driver, url):
    """Yields the page. At the end, checks that the page did not break its content security policy."""
    yield Page(driver, url).ready()
    trouble = [entry for entry in driver.get_log("browser") if "Content Security Policy" in entry["message"]]
    assert not [entry for entry in trouble if OUTSIDE not in entry["message"]], trouble
