"""The page of `kvedge serve` in a browser: chromium, driven as a person would."""

import base64
import io
import json

import browser
import pytest
from dialects import HERMES, WORKER, gbnf, model
from PIL import Image
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from server import ENDLESS, QUESTION, SCENES, asks, data_url, serving
from webpage import OUTSIDE, Page, opened

from pykvedge.plans import presets

pytestmark = browser.needed
KEY = "a key of more than sixteen letters".replace(" ", "-")

# data of a drag from a file manager, or of a paste
GIVE = """const [kind, url, type] = arguments;
const bytes = Uint8Array.from(atob(url.split(",")[1]), (c) => c.charCodeAt(0));
const data = new DataTransfer();
data.items.add(new File([bytes], "given", { type }));
const event = kind === "drop" ? new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true })
  : new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
document.getElementById("text").dispatchEvent(event);"""
# data of a drag from another page
DROP = """const data = new DataTransfer();
for (const [kind, text] of Object.entries(arguments[0])) data.setData(kind, text);
const event = new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true });
document.getElementById("text").dispatchEvent(event);"""
# darkness of the veil in the middle of each of 12 x 12 patches, 0 to 255
DARK = """const canvas = document.querySelector(".frame canvas"), drawn = canvas.getContext("2d");
const [w, h] = [canvas.width / 12, canvas.height / 12];
const dark = (i) => drawn.getImageData((i % 12 + .5) * w, (Math.floor(i / 12) + .5) * h, 1, 1).data[3];
return [...Array(144).keys()].map(dark);"""
LAYER = """const one = document.querySelector("figcaption input");
one.value = arguments[0];
one.dispatchEvent(new Event("input"));"""
# adds a grammar of endless answers to requests, because the demo model's answers end
NO_END = """const [grammar, plain] = [arguments[0], window.fetch];
window.fetch = (path, options) => {
  if (options?.body) options = { ...options, body: JSON.stringify({ ...JSON.parse(options.body), grammar }) };
  return plain(path, options);
};"""
# presses Esc as soon as an answer has begun, and records which of the two buttons were hidden
ESCAPE = """new MutationObserver((_, observer) => {
  if (!document.querySelector(".assistant .text")?.textContent.includes("aa")) return;
  observer.disconnect();
  window.hidden = ["stop", "send"].map((name) => document.getElementById(name).hidden);
  document.getElementById("text").dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
}).observe(document.getElementById("log"), { subtree: true, childList: true, characterData: true });"""
FULL = """IDBObjectStore.prototype.put = () => { throw new DOMException("no room", "QuotaExceededError"); };"""
NO_STORE = """indexedDB.open = () => { throw new DOMException("a private window", "SecurityError"); };"""
READ = "navigator.clipboard.readText().then(arguments[0], arguments[0])"
MARKDOWN = """## Head

- one **bold** <b>no</b> [out](javascript:alert(1)) ![a picture](http://192.0.2.1/x.png)

| a | b |
| - | - |
| 1 | 2 |

```py
x = 1 < 2
```"""
SERVED = ("--method", "lookm", "--budget", "0.3", "--ctx", "2048", "--memory", "64MiB")


@pytest.fixture
def page(driver, server):
    with opened(driver, server.url) as one:
        yield one


@pytest.fixture
def from_the_start(driver):
    """Runs a script in each page before the page's scripts."""
    run = []
    yield lambda text: run.append(driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": text}))
    for one in run:
        driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", one)


def test_a_picture_is_asked_about_and_what_is_kept_is_drawn(page, server):
    page.attach(SCENES[0])
    said = asks(QUESTION, SCENES[0])
    page.record()
    text = page.ask(QUESTION)
    told = server.chat(said, kvedge={"patches": True}).json()
    assert text == told["choices"][0]["message"]["content"]
    assert page.sent()[0]["messages"] == said  # a small picture stays unchanged
    figures = told["kvedge"][0]
    share = figures["kv"]["kept_bytes"] / figures["kv"]["full_bytes"]
    assert f"{100 * share:.0f} %" in page.get("kept").text
    [image] = figures["patches"]["images"]
    kept = mean([mean(shares) for shares in image["share"]])
    assert page.says("figcaption span")[0] == [f"{kept:.0f} % of 144 patches kept"]
    page.press("Show them")
    for layer, shares in enumerate(image["share"], 1):
        page.driver.execute_script(LAYER, layer)
        assert page.says("figcaption span")[0] == [f"Layer {layer - 1}: {mean(shares):.0f} % of 144 patches kept"]
        page.until(lambda shares=shares: is_darker_where_less_is_kept(page.driver.execute_script(DARK), shares))
    page.press("Show them")
    assert not page.all(".frame canvas")[0].is_displayed()


def mean(shares):
    return sum(shares) / len(shares)


def is_darker_where_less_is_kept(dark, shares):
    most = max(dark)
    return most > 200 and all(abs(one - most * (1 - share / 100)) < 3 for one, share in zip(dark, shares, strict=True))


def test_the_speed_is_the_servers(page):
    page.record()
    page.attach(SCENES[0])
    page.ask("Describe the image.")
    page.until(lambda: page.driver.execute_script("return window.came.length"))
    [came] = page.driver.execute_script("return window.came")
    last = json.loads(came.split("data: ")[-2])
    assert last["timings"]["predicted_n"] > 20
    shown = float(page.get("speed").text.replace(",", ""))
    assert shown == pytest.approx(last["timings"]["predicted_per_second"], rel=0.02)
    assert f"{page.get('speed').text} tokens/s" in page.all(".assistant .foot")[-1].text


def test_the_next_message_reads_nothing_again_also_after_a_reload(page):
    page.attach(SCENES[1])
    page.ask(QUESTION)
    page.ask("What is the code?")
    assert "tokens not read again" in page.all(".assistant .foot")[-1].text
    page.driver.refresh()
    page.ready()
    first = page.all("#conversations li")[0]
    assert first.find_element(By.TAG_NAME, "time").text == "now" and first.find_elements(By.TAG_NAME, "img")
    first.find_element(By.CLASS_NAME, "title").click()
    page.until(lambda: len(page.all(".message")) == 4)
    assert page.all(".user img")
    page.ask("Which shape is red?")
    assert "tokens not read again" in page.all(".assistant .foot")[-1].text


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_pictures_come_by_drop_and_by_paste(page, server, kind):
    page.driver.execute_script(GIVE, kind, data_url(SCENES[2]), "image/png")
    page.until(lambda: page.all("#attached img"))
    assert page.ask(QUESTION) == server.text(asks(QUESTION, SCENES[2]))


def test_text_can_be_dropped_and_pictures_of_other_pages_are_refused_in_words(page):
    page.driver.execute_script(DROP, {"text/plain": "What is there?"})
    page.until(lambda: page.get("text").get_attribute("value") == "What is there?")
    page.driver.execute_script(DROP, {"text/plain": OUTSIDE, "text/uri-list": OUTSIDE})
    page.until(lambda: "Save the picture" in page.get("error").text)
    assert page.get("text").get_attribute("value") == "What is there?"


def test_a_large_photograph_is_sent_upright_and_small(page, tmp_path):
    photo = Image.new("RGB", (3000, 1000), "blue")
    photo.paste("red", (0, 0, 1000, 1000))
    turned = photo.getexif()
    turned[0x0112] = 6  # its left side is up
    photo.save(tmp_path / "photo.jpg", exif=turned)
    page.record()
    page.attach(tmp_path / "photo.jpg")
    assert "scaled from 1000 × 3000 to 683 × 2048 pixels" in page.all("#attached img")[0].accessible_name  # noqa: RUF001
    page.ask(QUESTION)
    url = page.sent()[0]["messages"][0]["content"][0]["image_url"]["url"]
    sent = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert sent.size == (683, 2048) and 0x0112 not in sent.getexif()
    assert sent.getpixel((340, 300))[0] > 200 > 50 > sent.getpixel((340, 1500))[0]


def test_escape_stops_an_answer_and_the_server_with_it(page, server):
    page.driver.execute_script(NO_END, ENDLESS)
    page.driver.execute_script(ESCAPE)
    page.get("text").send_keys(QUESTION, Keys.ENTER)
    page.until(lambda: page.driver.execute_script("return window.hidden") == [False, True])
    page.until(lambda: page.get("send").is_displayed())
    server.wait_for("requests_running", 0)
    assert page.all(".assistant .text")[-1].text.startswith("aa") and not page.get("error").is_displayed()
    assert page.all(".assistant .foot .quiet")[-1].text == "stopped"
    page.driver.refresh()
    page.ready().ask("What is the code?")


def test_what_cannot_be_used_is_said_and_nothing_is_lost(page, tmp_path):
    broken, words, document = tmp_path / "broken.png", tmp_path / "words.txt", tmp_path / "report.pdf"
    broken.write_bytes(SCENES[0].read_bytes()[:40])
    words.write_text("no picture")
    document.write_bytes(b"%PDF-1.4 and nothing else")
    for path, why in ((broken, "broken.png cannot be read as a picture"), (words, "words.txt is neither a picture")):
        page.get("file").send_keys(str(path))
        page.until(lambda why=why: why in page.get("error").text)
    assert not page.all("#attached li")
    page.record()
    page.attach(document)
    page.get("text").send_keys(QUESTION, Keys.ENTER)
    page.until(lambda: page.get("again").is_displayed())
    assert "The server refuses this" in page.get("error").text and page.says(".user .chip", ".user .text") == [
        ["report.pdf"], [QUESTION]
    ]  # fmt: skip
    part = {"filename": "report.pdf", "file_data": "data:application/pdf;base64,JVBERi0xLjQgYW5kIG5vdGhpbmcgZWxzZQ=="}
    assert page.sent()[0]["messages"][0]["content"][0] == {"type": "file", "file": part}
    page.get("again").click()  # a changed request, as the same one would be refused again
    assert page.get("text").get_attribute("value") == QUESTION and page.says("#attached .chip") == [["report.pdf"]]
    page.press("Remove report.pdf")
    page.attach(SCENES[0])
    page.get("text").send_keys(Keys.ENTER)
    page.answered(1)
    assert len(page.all(".message")) == 2 and not page.get("error").is_displayed()


def test_messages_are_changed_and_deleted_and_brought_back(page, server):
    page.attach(SCENES[0])
    first = page.ask("What is the code?")
    second = page.ask(QUESTION)
    before = page.says(".text")
    page.press("Delete this message and its answer")
    assert page.says(".text") == [["What is the code?", first]]
    page.press("Undo")
    assert page.says(".text") == before

    page.get("text").send_keys(Keys.ARROW_UP)
    assert page.get("text").get_attribute("value") == QUESTION
    page.press("Leave it as it was")
    assert page.get("text").get_attribute("value") == "" and page.says(".text") == before

    page.get("text").send_keys("A draft")
    page.press("Change this message", 0)
    assert page.all("#attached img")
    page.get("text").clear()
    page.get("text").send_keys("Describe the image.", Keys.ENTER)
    text = page.answered(1)
    assert text == server.text(asks("Describe the image.", SCENES[0]), max_tokens=100)
    assert page.says(".text") == [["Describe the image.", text]] and second != text
    assert page.get("text").get_attribute("value") == "A draft" and not page.all("#attached img")
    page.get("text").clear()
    page.press("Undo")
    assert page.says(".text") == before

    n = len(page.all("#conversations li"))
    page.press("Delete What is the code?", 0)
    assert page.all(".empty") and len(page.all("#conversations li")) == n - 1
    page.press("Undo")
    page.driver.refresh()
    page.ready().all("#conversations .title")[0].click()
    page.until(lambda: page.says(".text") == before)


def test_undo_ends_the_answer_to_what_is_taken_back(page, server):
    page.attach(SCENES[0])
    page.ask("What is the code?")
    before = page.says(".text")
    page.driver.execute_script(NO_END, ENDLESS)
    page.press("Answer again")
    page.until(lambda: "aa" in page.all(".assistant .text")[-1].text)
    page.press("Undo")
    page.until(lambda: page.get("send").is_displayed())
    server.wait_for("requests_running", 0)
    assert page.says(".text") == before


@pytest.mark.parametrize(("broken", "why"), [
    pytest.param(FULL, "no more room", id="full"), pytest.param(NO_STORE, "stores no conversations", id="private"),
])  # fmt: skip
def test_the_page_goes_on_where_the_browser_stores_nothing(page, from_the_start, broken, why):
    from_the_start(broken)
    page.driver.refresh()
    page.ready().ask("What is there?")
    assert why in page.get("storage").text
    page.get("new").click()
    page.until(lambda: page.all(".empty"))
    page.all("#conversations .title")[0].click()
    page.until(lambda: len(page.all(".message")) == 2)


def test_a_choice_holds_for_the_next_answer_and_methods_say_what_they_do(page):
    page.attach(SCENES[3])
    for one in page.all("#method option"):
        name, _, words = one.get_attribute("textContent").partition(": ")
        assert words and presets.preset(name).summary.startswith(words)
    page.choose("method", "full")
    assert "All KV pairs." in page.get("method-about").text
    assert not page.get("budget").is_enabled()
    page.ask(QUESTION)
    assert "100 % of" in page.all(".assistant .foot")[-1].text


def test_the_servers_own_plan_holds_until_a_slider_is_moved(driver, environment):
    """The page must not round the server's plan to its sliders: budget 0.33 to 0.35, image tokens 0.42 to all."""
    options = ("--method", "snapkv", "--budget", "0.33", "--sinks", "3", "--image-tokens", "0.42")
    with serving(environment, *options) as server, opened(driver, server.url) as page:
        page.attach(SCENES[0])
        page.record()
        assert [page.get(f"{name}-out").text for name in ("budget", "image-tokens")] == ["33 %", "42 %"]
        page.ask(QUESTION)
        page.choose("budget", 1)
        page.choose("image-tokens", 0.5)
        page.ask(QUESTION)
        assert "100 % of" in page.all(".assistant .foot")[-1].text
        first, second = (body["kvedge"] for body in page.sent())
        same = {"method": "snapkv", "progress": True, "patches": True}
        assert (first, second) == (same, {**same, "budget": 1, "image_tokens": 0.5})


def test_conversations_on_the_server_are_shown_and_forgotten(page, server):
    page.attach(SCENES[0])
    page.ask(QUESTION)
    before = len(server.sessions())
    page.get("look").click()
    page.until(lambda: len(page.all("#sessions tbody tr")) == before)
    page.all("#sessions tbody button")[0].click()
    page.until(lambda: len(server.sessions()) == before - 1)


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


def test_answers_are_markdown_and_nothing_in_them_runs_or_is_fetched(environment, driver, tmp_path):
    run = serving(environment, model(tmp_path, HERMES), gbnf(MARKDOWN), program=WORKER)
    with run as server, opened(driver, server.url) as page:
        page.ask("Hi")
        heads, bold, cells, code = page.says(".md h2", ".md strong", ".md td", ".md pre")
        assert (heads, bold, cells, code) == (["Head"], ["bold"], ["1", "2"], ["x = 1 < 2"])
        assert "<b>no</b> out a picture" in page.all(".md li")[0].text and not page.all(".md img, .md b")
        assert [one.get_attribute("href") for one in page.all(".md a")] in ([], [None])
        page.driver.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"]})
        for button, copied in (("Copy the code", "x = 1 < 2"), ("Copy the answer", MARKDOWN)):
            page.press(button)
            page.until(lambda copied=copied: page.driver.execute_async_script(READ).strip() == copied)


def test_a_server_with_a_key_asks_for_it(environment, driver, tmp_path):
    file = tmp_path / "key"
    file.write_text(KEY)
    with serving(environment, "--key-file", file, "--ctx", "1024") as server:
        page = Page(driver, server.url)
        page.until(lambda: page.get("key-dialog").is_displayed())
        assert not page.get("key-wrong").is_displayed()
        page.get("key").send_keys("wrong", Keys.ENTER)
        page.until(lambda: page.get("key-wrong").is_displayed())
        page.get("key").send_keys(KEY, Keys.ENTER)
        page.ready()
        page.attach(SCENES[0])
        assert page.ask(QUESTION)
        assert "MiB" in page.get("private").text
