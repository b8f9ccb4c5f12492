"""`kvedge serve --allow-origin` in a browser: allowed pages can use the API, other pages cannot."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import browser
import pytest
from browser import browsing
from server import serving

pytestmark = browser.needed
KEY = "a-key-of-more-than-sixteen-letters"
ASK = """const [url, options, done] = arguments;
fetch(url, options).then(async (answer) => done([answer.status, answer.type, await answer.text()]),
                         (error) => done([0, error.name, ""]));"""


class Empty(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def sites():
    """The addresses of two sites, each with an empty page."""
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Empty) for _ in range(2)]
    for one in servers:
        threading.Thread(target=one.serve_forever, daemon=True).start()
    yield [f"http://127.0.0.1:{one.server_address[1]}" for one in servers]
    for one in servers:
        one.shutdown()
        one.server_close()


@pytest.fixture(scope="module")
def driver():
    with browsing() as running:
        running.set_script_timeout(60)
        yield running


def chat(key=KEY, **fields):
    said = '{"messages": [{"role": "user", "content": "What is there?"}], "max_tokens": 4, "stream": true}'
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    return {"method": "POST", "headers": headers, "body": said, **fields}


def test_an_invited_page_asks(environment, driver, sites, tmp_path):
    (tmp_path / "key").write_text(KEY)
    driver.get(sites[0])
    with serving(environment, "--ctx", "512", "--key-file", tmp_path / "key", "--allow-origin", sites[0]) as server:
        for path in ("/v1/chat/completions", "/v1/messages"):
            status, kind, text = driver.execute_async_script(ASK, f"{server.url}{path}", chat())
            assert (status, kind) == (200, "cors") and ("[DONE]" in text or "message_stop" in text)
        headers = {"Authorization": f"Bearer {KEY}"}
        status, kind, text = driver.execute_async_script(ASK, f"{server.url}/props", {"headers": headers})
        assert (status, kind) == (200, "cors") and '"vision":true' in text
        assert server.client.get("/v1/health").status_code == server.client.get("/health").status_code == 200
        # a page can also read errors: a front end must show them
        status, kind, text = driver.execute_async_script(ASK, f"{server.url}/v1/chat/completions", chat("wrong"))
        assert (status, kind) == (401, "cors") and "invalid_api_key" in text


def test_another_page_neither_asks_nor_reads(environment, driver, sites):
    """Requests that browsers send without a preflight are also refused."""
    blind = {"method": "POST", "body": chat()["body"], "mode": "no-cors", "headers": {"Content-Type": "text/plain"}}
    with serving(environment, "--ctx", "512", "--allow-origin", sites[0]) as server:
        driver.get(sites[1])
        for options in (chat(), blind, {}):
            status, _, text = driver.execute_async_script(ASK, f"{server.url}/v1/chat/completions", options)
            assert (status, text) == (0, "")
        assert server.metric("prompt_tokens_total") == 0
        driver.get(sites[0])
        driver.execute_async_script(ASK, f"{server.url}/v1/chat/completions", blind)
        assert server.metric("prompt_tokens_total") > 0
