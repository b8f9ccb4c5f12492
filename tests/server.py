"""Runs `kvedge serve` as a process, for tests."""

import base64
import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
from forking import Warm
from waits import until

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "pykvedge" / "data"
ENDLESS = 'root ::= "a" root'  # a grammar of endless answers
GOES_ON = '"content": "a'  # contained in each line of a stream that follows ENDLESS
SERVE = ("serve", "--port", "0", "--threads", "1")
QUESTION = "How many shapes are there?"
SCENES = sorted((ROOT / "examples").glob("scene-?.png"))


class Server:
    """A running server. `told`: the JSON object that it printed at its start."""

    def __init__(self, process, told):
        self.process, self.told, self.url = process, told, told["url"]
        self.client = httpx.Client(base_url=self.url, timeout=120)

    def chat(self, messages, **fields):
        fields = {"temperature": 0, "max_tokens": 24, **fields}
        return self.client.post("/v1/chat/completions", json={"messages": messages, **fields})

    def text(self, messages, **fields):
        answer = self.chat(messages, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]

    @contextmanager
    def endless(self, messages, **fields):
        """Yields the lines of an endless stream that has begun."""
        fields = {"max_tokens": 1500, "grammar": ENDLESS, **fields, "messages": messages, "stream": True}
        with self.client.stream("POST", "/v1/chat/completions", json=fields) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if GOES_ON in line)
            yield lines

    def metric(self, name):
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(f"kvedge_{name} "):
                return float(line.split()[-1])
        raise AssertionError(f"no {name}")

    def wait_for(self, name, value):
        until(lambda: self.metric(name) == value)

    def memory(self):
        return self.client.get("/v1/kvedge/memory").json()

    def sessions(self):
        return self.client.get("/v1/kvedge/sessions").json()["sessions"]

    def most_kib(self, work):
        """Returns the KiB that the process needs for `work` at the peak, beyond its size before. Linux only."""
        process = Path(f"/proc/{self.told['pid']}")

        def kib(name):
            return int(next(x for x in (process / "status").read_text().splitlines() if x.startswith(name)).split()[1])

        (process / "clear_refs").write_text("5")
        before = kib("VmRSS")
        work()
        return kib("VmHWM") - before

    def end(self, number=signal.SIGTERM):
        self.client.close()
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@contextmanager
def serving(environment, *arguments, program=("-m", "pykvedge", *SERVE)):
    """Starts a server, yields a Server. program: the arguments of Python before `arguments`."""
    command = [sys.executable, *map(str, (*program, *arguments))]
    process = Warm(
        command, env=environment, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield Server(process, json.loads(line))
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def picture(path):
    return {"type": "image_url", "image_url": {"url": data_url(path)}}


def data_url(picture):
    """picture: a file, or its bytes."""
    data = picture if isinstance(picture, bytes) else Path(picture).read_bytes()
    return "data:image/png;base64," + base64.b64encode(data).decode()


def source_of(picture):
    """Returns a picture in the form of /v1/messages."""
    data = data_url(picture).partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def asks(text, *paths):
    return [{"role": "user", "content": [*map(picture, paths), {"type": "text", "text": text}]}]


def then(said, text, question):
    """Returns the conversation with an answer and another question added."""
    return [*said, {"role": "assistant", "content": text}, {"role": "user", "content": question}]


def cached(body):
    """Returns the number of prompt tokens that were in the cache."""
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


def check_refused(answer, *words, status=400):
    """Checks the status and that the error's message is one line with the words. Returns the error object."""
    error = answer.json()["error"]
    assert answer.status_code == status and "\n" not in error["message"], answer.text
    assert all(word in error["message"] for word in words), error
    return error
