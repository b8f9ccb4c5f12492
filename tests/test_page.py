"""The page of `kvedge serve` in a browser: chromium, driven as a person drives it."""

from __future__ import annotations

import time

import browser
import pytest
from browser import browsing
from dialects import HERMES, WORKER, gbnf, model
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from server import ENDLESS, QUESTION, SCENES, asks, data_url, serving

pytestmark = browser.needed
OUTSIDE = "http://192.0.2.1/"
KEY = "a key of more than sixteen letters".replace(" ", "-")

# what a drag from a file manager, or a paste, hands to a page
GIVE = """const [kind, url, type] = arguments;
const bytes = Uint8Array.from(atob(url.split(",")[1]), (c) => c.charCodeAt(0));
const data = new DataTransfer();
data.items.add(new File([bytes], "given", { type }));
const event = kind === "drop" ? new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true })
  : new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
document.getElementById("text").dispatchEvent(event);"""
CHOOSE = """const one = document.getElementById(arguments[0]);
one.value = arguments[1];
one.dispatchEvent(new Event("input"));"""
# the green of the middle of each of 12 x 12 patches
LIGHT = """const canvas = document.getElementById("canvas"), drawn = canvas.getContext("2d");
const [w, h] = [canvas.width / 12, canvas.height / 12];
const green = (i) => drawn.getImageData((i % 12 + .5) * w, (Math.floor(i / 12) + .5) * h, 1, 1).data[1];
return [...Array(144).keys()].map(green);"""
# answers of a demo model end by themselves; this adds a grammar to requests, which has none
NO_END = """const [grammar, plain] = [arguments[0], window.fetch];
window.fetch = (path, options) => {
  if (options?.body) options = { ...options, body: JSON.stringify({ ...JSON.parse(options.body), grammar }) };
  return plain(path, options);
};"""


class Page:
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
        self.until(lambda: self.get("model").text)
        return self

    def attach(self, path):
        before = len(self.all("#attached img"))
        self.get("file").send_keys(str(path))
        self.until(lambda: len(self.all("#attached img")) == before + 1)

    def choose(self, name, value):
        self.driver.execute_script(CHOOSE, name, value)

    def ask(self, text):
        """Returns the answer's text, when it is complete."""
        before = len(self.all(".assistant .foot .quiet"))
        self.get("text").send_keys(text, Keys.ENTER)
        self.until(lambda: len(self.all(".assistant .foot .quiet")) == before + 1)
        return self.all(".assistant .text")[-1].text


@pytest.fixture(scope="module")
def server(environment):
    with serving(environment, "--method", "lookm", "--budget", "0.3", "--ctx", "2048", "--memory", "64MiB") as one:
        yield one


@pytest.fixture(scope="module")
def driver():
    with browsing() as one:
        yield one


@pytest.fixture
def page(driver, server):
    one = Page(driver, server.url).ready()
    yield one
    trouble = [entry for entry in driver.get_log("browser") if "Content Security Policy" in entry["message"]]
    assert not [entry for entry in trouble if OUTSIDE not in entry["message"]], trouble


def test_a_picture_is_asked_about_and_what_is_kept_is_drawn(page, server):
    page.attach(SCENES[0])
    said = asks(QUESTION, SCENES[0])
    text = page.ask(QUESTION)
    told = server.chat(said, kvedge={"patches": True}).json()
    assert text == told["choices"][0]["message"]["content"]
    figures = told["kvedge"][0]
    share = figures["kv"]["kept_bytes"] / figures["kv"]["full_bytes"]
    assert f"{100 * share:.0f} %" in page.get("kept").text
    [image] = figures["patches"]["images"]
    for layer, shares in enumerate(image["share"], 1):
        page.choose("layer", layer)
        mean = sum(shares) / len(shares)
        page.until(lambda layer=layer: f"layer {layer - 1}:" in page.get("patches-out").text)
        number = float(page.get("patches-out").text.split(": ")[1].split(" %")[0])
        assert number == pytest.approx(mean, abs=0.51)
    # a patch that is kept by all is as bright as the picture, one that is not by far darker
    light = page.driver.execute_script(LIGHT)
    shares = image["share"][-1]
    dark = [light[i] for i in range(144) if shares[i] == 0]
    bright = [light[i] for i in range(144) if shares[i] == 100]
    assert dark and bright and max(dark) < 60 < sum(bright) / len(bright)


def test_the_next_message_reads_nothing_again_also_after_a_reload(page):
    page.attach(SCENES[1])
    page.ask(QUESTION)
    page.ask("What is the code?")
    assert "tokens not read again" in page.all(".assistant .foot")[-1].text
    page.driver.refresh()
    page.ready()
    page.all("#conversations .title")[1].click()  # the first one is new
    page.until(lambda: len(page.all(".message")) == 4)
    assert page.all(".user img")
    page.ask("Which shape is red?")
    assert "tokens not read again" in page.all(".assistant .foot")[-1].text


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_pictures_come_by_drop_and_by_paste(page, server, kind):
    page.driver.execute_script(GIVE, kind, data_url(SCENES[2]), "image/png")
    page.until(lambda: page.all("#attached img"))
    assert page.ask(QUESTION) == server.text(asks(QUESTION, SCENES[2]))


def test_escape_stops_an_answer_and_the_server_with_it(page, server):
    page.driver.execute_script(NO_END, ENDLESS)
    page.get("text").send_keys(QUESTION, Keys.ENTER)
    page.until(lambda: "aa" in page.all(".assistant .text")[-1].text)
    assert page.get("stop").is_displayed() and not page.get("send").is_enabled()
    page.get("text").send_keys(Keys.ESCAPE)
    page.until(lambda: page.get("send").is_enabled())
    server.wait_for("requests_running", 0)
    assert page.all(".assistant .text")[-1].text.startswith("aa") and not page.get("error").is_displayed()
    page.driver.refresh()
    page.ready().ask("What is the code?")


def test_what_cannot_be_used_is_said_and_nothing_is_lost(page, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(SCENES[0].read_bytes()[:400])
    page.attach(broken)
    page.get("text").send_keys(QUESTION, Keys.ENTER)
    page.until(lambda: page.get("error").is_displayed())
    assert "picture 1" in page.get("error").text and page.get("again").is_displayed()
    assert page.get("send").is_enabled() and len(page.all(".message.user")) == 1
    words = tmp_path / "words.txt"
    words.write_text("no picture")
    page.get("file").send_keys(str(words))
    page.until(lambda: "words.txt is no picture" in page.get("error").text)
    page.get("new").click()
    page.attach(SCENES[0])
    assert page.ask(QUESTION)


def test_a_choice_holds_for_the_next_answer(page):
    page.attach(SCENES[3])
    page.choose("method", "full")
    assert not page.get("budget").is_enabled()
    page.ask(QUESTION)
    assert "100 % of" in page.all(".assistant .foot")[-1].text


def test_conversations_on_the_server_are_shown_and_forgotten(page, server):
    page.attach(SCENES[0])
    page.ask(QUESTION)
    parked = lambda: len(server.client.get("/v1/kvedge/sessions").json()["sessions"])  # noqa: E731
    before = parked()
    page.get("look").click()
    page.until(lambda: len(page.all("#sessions tbody tr")) == before)
    page.all("#sessions tbody button")[0].click()
    page.until(lambda: parked() == before - 1)


def test_keys_and_screen_readers_reach_everything(page):
    page.attach(SCENES[0])
    page.ask(QUESTION)
    controls = [one for one in page.all("button, input, select, textarea, canvas, progress") if one.is_displayed()]
    assert len(controls) > 12 and all(one.accessible_name for one in controls)
    assert page.driver.find_element(By.TAG_NAME, "html").get_attribute("lang") == "en"
    roles = {one.aria_role for one in page.all("nav, main, aside, #log, #composer")}
    assert roles >= {"navigation", "main", "complementary", "log"}
    reached = set()
    page.get("text").click()
    for _ in range(60):
        now = page.driver.switch_to.active_element
        reached.add(now.get_attribute("id") or now.text)
        now.send_keys(Keys.TAB)
    assert {"text", "attach", "send", "method", "budget", "layer", "look", "new"} <= reached


def test_nothing_is_asked_of_anybody_else(page, server):
    page.ask("What is there?")
    asked = page.driver.execute_script("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert asked and all(url.startswith((server.url, "data:", "blob:")) for url in asked)
    found = page.driver.execute_async_script(
        f"const done = arguments[0]; fetch('{OUTSIDE}').then(() => done('went out'), (e) => done(String(e)))"
    )
    assert "went out" not in found


def test_reasoning_is_shown_apart_and_folds_up(environment, driver, tmp_path):
    answer = gbnf("<think>\nhm < hm\n</think>\n\nHello <b>")
    with serving(environment, model(tmp_path, HERMES), answer, program=WORKER) as server:
        page = Page(driver, server.url).ready()
        assert page.ask("Hi") == "Hello <b>"
        thought = page.all(".assistant details")[-1]
        assert thought.is_displayed() and not thought.get_attribute("open")
        thought.click()
        assert page.all(".assistant .thought")[-1].text == "hm < hm"


def test_a_server_with_a_key_asks_for_it(environment, driver, tmp_path):
    file = tmp_path / "key"
    file.write_text(KEY)
    with serving(environment, "--key-file", file, "--ctx", "1024") as server:
        page = Page(driver, server.url)
        page.until(lambda: page.get("key-dialog").is_displayed())
        page.get("key").send_keys("wrong", Keys.ENTER)
        time.sleep(0.3)
        page.until(lambda: page.get("key-dialog").is_displayed())
        page.get("key").send_keys(KEY, Keys.ENTER)
        page.ready()
        page.attach(SCENES[0])
        assert page.ask(QUESTION)
        assert "MiB" in page.get("private").text
