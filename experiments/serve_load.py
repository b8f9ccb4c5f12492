"""Clients for experiments/measure_serve.py: they ask a server about pictures, go on, or leave in the middle."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import scriptpath  # noqa: F401
from llama_source import ROOT

SCENES = [str(path) for path in sorted((ROOT / "examples").glob("scene-?.png"))]
QUESTIONS = ("Describe the image.", "What is the code?", "How many shapes are there?", "What is at the top left?")
LEAVES, GOES_ON = 0.15, 0.4  # shares of answers: abandoned; followed by another question
TOKENS = 64


@dataclass
class Seen:
    """The results of clients. answers: seconds of each complete answer; first: seconds to its first token."""

    answers: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    tokens: int = 0
    characters: int = 0  # of complete answers: servers count the last token differently
    left: int = 0
    wrong: list[str] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)  # (KV bytes of prompts, bytes after compression)
    full: list[float] = field(default_factory=list)
    seconds: float = 0.0


@functools.cache
def picture(path: str) -> dict[str, Any]:
    """Returns the part of a message that shows a PNG file."""
    data = base64.b64encode(Path(path).read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


class Load:
    """Clients of one server. Greedy answers to the same messages are equal, so lost or mixed answers are noticed."""

    def __init__(self, url: str, fields: dict[str, Any] | None = None, seed: int = 0) -> None:
        """fields: fields of every request, in addition to the messages."""
        host, _, port = url.removeprefix("http://").partition(":")
        self.address = (host, int(port))
        self.fields = {
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": TOKENS,
        }
        self.fields |= fields or {}
        self.random = random.Random(seed)
        self.known: dict[str, str] = {}  # messages -> answer

    async def run(self, clients: int, seconds: float) -> Seen:
        """Runs clients for some seconds, and waits for the answers that have begun."""
        seen, began = Seen(), time.monotonic()
        await asyncio.gather(*[self._client(seen, began + seconds) for _ in range(clients)])
        seen.seconds = time.monotonic() - began
        return seen

    async def _client(self, seen: Seen, end: float) -> None:
        while time.monotonic() < end:
            said = [self._asks(self.random.choice(SCENES), self.random.choice(QUESTIONS))]
            text = await self._ask(seen, said)
            if text is not None and self.random.random() < GOES_ON:
                again = {"role": "user", "content": self.random.choice(QUESTIONS)}
                await self._ask(seen, [*said, {"role": "assistant", "content": text}, again])

    def _asks(self, path: str, text: str) -> dict[str, Any]:
        return {"role": "user", "content": [picture(path), {"type": "text", "text": text}]}

    async def _ask(self, seen: Seen, messages: list[Any]) -> str | None:
        """Returns the answer; None: the client left, or no answer came."""
        leaves = self.random.randrange(1, 48) if self.random.random() < LEAVES else 0
        began, first, text, usage = time.monotonic(), 0.0, "", None
        reader, writer = await asyncio.open_connection(*self.address, limit=1 << 24)
        try:
            body = json.dumps({"messages": messages, **self.fields}).encode()
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self.address[0]}\r\nContent-Type: application/json\r\n"
            )
            writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
            async for line in reader:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    break
                piece = (chunk["choices"] or [{}])[0].get("delta", {}).get("content")
                if piece:
                    first, text = first or time.monotonic() - began, text + piece
                if leaves and len(text) >= leaves:
                    seen.left += 1
                    return None
                usage = chunk.get("usage") or usage
                for cost in chunk.get("kvedge") or []:
                    seen.kept.append(cost["kv"]["kept_bytes"])
                    seen.full.append(cost["kv"]["full_bytes"])
        finally:
            writer.close()
        self._note(seen, messages, text, usage)
        if usage is None:
            return None
        seen.answers.append(time.monotonic() - began)
        seen.first.append(first)
        seen.tokens += usage["completion_tokens"]
        seen.characters += len(text)
        return text

    def _note(self, seen: Seen, messages: list[Any], text: str, usage: Any) -> None:
        said = json.dumps(messages)
        if usage is None:
            seen.wrong.append("no answer")
        elif self.known.setdefault(said, text) != text:
            seen.wrong.append(f"{text!r}, before {self.known[said]!r}")
