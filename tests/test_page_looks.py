"""The page of `kvedge serve` for eyes, fingers, keys and screen readers, with the packaged model and its defaults."""

import browser
import page_pictures
import pytest
from page_pictures import show
from PIL import Image
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from server import SCENES
from webpage import opened

axe_core = pytest.importorskip("axe_core_python.selenium")
pytestmark = browser.needed
TOLD = (SCENES[0].parent / "scenes.md").read_text().splitlines()
DESCRIBED = {i: next(line for line in TOLD if path.name in line).partition("): ")[2] for i, path in enumerate(SCENES)}
ANSWERS = {  # answers to the examples of the empty page
    "What is the code?": "64UM3",
    "How many circles are there?": "three",
    "What colour is the triangle?": "red",
    "Describe the image.": DESCRIBED[0],
}
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice")
WIDE = "return document.documentElement.scrollWidth"
PLACES = """const box = (id) => document.getElementById(id).getBoundingClientRect();
const { left, right, bottom } = box("composer");
return { left, right, bottom, log: box("log").height };"""
AT_END = """const log = document.getElementById("log");
return log.scrollHeight > 2 * log.clientHeight - 200 && log.scrollHeight - log.scrollTop - log.clientHeight < 2;"""
FOCUSED = """window.reached = [];
const name = (one) => one.id || one.ariaLabel || one.textContent;
document.addEventListener("focusin", (event) => window.reached.push(name(event.target)));"""
SERVED = ()


@pytest.fixture
def page(driver, server):
    show(driver, 1400, 900)
    with opened(driver, server.url) as one:
        yield one


def sound(page, kinds=RULES):
    """Fails with the findings of axe: names, roles, contrast, headings, landmarks, scrollable regions."""
    told = axe_core.Axe().run(page.driver, options={"runOnly": list(kinds)})
    found = told["violations"]
    assert told["passes"]
    assert not found, [(one["id"], [node["html"] for node in one["nodes"]]) for one in found]


def test_the_examples_of_the_empty_page_are_answered_right(page):
    assert [one.text for one in page.all(".examples button")] == list(ANSWERS)
    for question, answer in ANSWERS.items():
        page.get("new").click()
        page.press(question)
        assert page.answered(1) == answer
        assert page.all(".user img") and page.get("heading").text == question


@pytest.mark.whole
def test_pictures_for_the_documentation_have_right_answers(driver, server, tmp_path):
    said = page_pictures.take(driver, server.url, tmp_path)
    assert said == {
        3: {"Describe the image.": DESCRIBED[3]},
        0: {"What is the code?": "64UM3", "Where is the pink circle?": "at the bottom left"},
    }
    for name, (width, height) in page_pictures.SIZES.items():
        scale = 2 if width <= page_pictures.PHONE else 1
        with Image.open(tmp_path / name) as picture:
            assert picture.size == (scale * width, scale * height)
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 100


def test_axe_finds_nothing(page):
    sound(page)
    page.attach(SCENES[0])
    page.ask("What is the code?")
    page.attach(SCENES[0])
    page.press("Show them")
    page.press("Delete this message and its answer")
    page.press("Undo")
    page.press("Show them")
    page.get("look").click()
    page.until(lambda: page.all("#sessions tbody tr"))
    page.driver.execute_script("document.querySelector('aside details').open = true")
    sound(page)
    show(page.driver, 1400, 900, dark=True)
    sound(page, ["color-contrast"])
    page.get("help").click()
    sound(page)
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    show(page.driver, 390, 844)
    still = "return !document.getAnimations().length"
    for button in page.all("header [popovertarget]"):
        button.click()
        page.until(lambda: page.all(":popover-open") and page.driver.execute_script(still))
        sound(page)
        page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
        page.until(lambda: not page.all(":popover-open"))


def test_a_phone_shows_the_message_box_below_and_the_rest_in_drawers(page):
    show(page.driver, 390, 844)
    page.driver.refresh()
    page.ready()
    assert page.driver.switch_to.active_element.tag_name == "body"  # focus would open the keyboard
    page.attach(SCENES[0])
    page.get("text").send_keys("What is", Keys.ENTER, "the code?")
    assert not page.all(".message") and "\n" in page.get("text").get_attribute("value")
    page.get("send").click()
    page.answered(1)
    at = page.driver.execute_script(PLACES)
    assert page.driver.execute_script(WIDE) == 390 and 0 < at["left"] < at["right"] < 390
    assert 800 < at["bottom"] <= 844 and at["log"] > 500
    assert not page.get("method").is_displayed() and not page.get("new").is_displayed()
    page.all(".for-side")[0].click()
    page.until(lambda: page.get("method").is_displayed())
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.until(lambda: not page.get("method").is_displayed())
    page.all(".for-nav")[0].click()
    page.until(lambda: page.get("new").is_displayed())
    page.get("new").click()
    page.until(lambda: page.all(".empty") and not page.get("new").is_displayed())


@pytest.mark.parametrize("width", [320, 768, 1200])
def test_nothing_is_wider_than_the_window(page, width):
    show(page.driver, width, 700)
    assert page.driver.execute_script(WIDE) == width
    assert page.driver.execute_script(PLACES)["bottom"] <= 700


def test_the_end_of_a_conversation_is_shown_below_its_pictures(page):
    show(page.driver, 768, 600)
    page.attach(SCENES[0])
    page.attach(SCENES[1])
    page.ask("What is the code in image 2?")
    page.driver.refresh()
    page.ready().all("#conversations .title")[0].click()
    page.until(lambda: page.driver.execute_script(AT_END))


def test_keys_reach_everything(page):
    page.attach(SCENES[0])
    page.ask("What is the code?")
    page.get("text").click()
    page.driver.execute_script(FOCUSED)
    ActionChains(page.driver).send_keys(Keys.TAB * 40).perform()
    reached = set(page.driver.execute_script("return window.reached"))
    assert {"text", "attach", "send", "method", "budget", "look", "new", "log", "help"} <= reached
    assert {"Show them", "Copy the answer", "Answer again", "Change this message"} <= reached
    page.get("log").send_keys("?")
    page.until(lambda: page.get("help-dialog").is_displayed())
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.get("log").send_keys("/")
    assert page.driver.switch_to.active_element == page.get("text") and not page.get("text").get_attribute("value")


def test_screen_readers_are_told_each_paragraph_once(page):
    page.driver.execute_script("""window.told = [];
const live = document.getElementById("live");
new MutationObserver(() => window.told.push(live.textContent)).observe(live, { childList: true });""")
    page.attach(SCENES[0])
    text = page.ask("Describe the image.")
    assert page.driver.execute_script("return window.told") == [text]
    assert [page.get(one).get_attribute("aria-live") for one in ("log", "live")] == ["off", "polite"]
    assert page.driver.find_element(By.TAG_NAME, "html").get_attribute("lang") == "en"
