"""A server of `kvedge serve` as a process, for tests."""

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
ENDLESS = 'root ::= "a" root'  # a grammar whose answers have no end
SERVE = ("serve", "--port", "0", "--threads", "1")
QUESTION = "How many shapes are there?"
SCENES = sorted((ROOT / "examples").glob("scene-?.png"))


class Server:
    """One that answers. `told` is what it printed when it began."""

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

    def metric(self, name):
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(f"kvedge_{name} "):
                return float(line.split()[-1])
        raise AssertionError(f"no {name}")

    def wait_for(self, name, value):
        until(lambda: self.metric(name) == value)

    def end(self, number=signal.SIGTERM):
        self.client.close()
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@contextmanager
def serving(environment, *arguments, program=("-m", "pykvedge", *SERVE)):
    """program: what Python is told to run, before the arguments."""
    command = [sys.executable, *map(str, (*program, *arguments))]
    process = (Warm if program[:2] == ("-m", "pykvedge") else subprocess.Popen)(
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


def data_url(path):
    return "data:image/png;base64," + base64.b64encode(Path(path).read_bytes()).decode()


def asks(text, *paths):
    return [{"role": "user", "content": [*map(picture, paths), {"type": "text", "text": text}]}]
