"""Measures the cost of one hostile request for a server: added resident memory, and the waits of another client.

    python3 scripts/dev.py python experiments/measure_bodies.py

Each body goes to a fresh `kvedge serve` with the packaged model. Memory is the system's VmHWM, reset before the body is
sent. Another client asks a plain question, a question with a small picture, and /health in turns. Its longest wait is
printed beside its longest wait in the same number of seconds without the body. The request may be refused. "hostile
forms" are all grammars and schemas of tests/test_grammar_bounds.py, one after another, each with up to 64 tokens.
"""

from __future__ import annotations

import base64
import functools
import io
import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
from PIL import Image

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from server import Server, serving
from test_grammar_bounds import HOSTILE

SIDE = 7000
MEDIUM = 1870  # side of a picture just below the size where pictures are scaled
CHAT, MIB = "/v1/chat/completions", 1 << 20


def file_of(
    kind: str, mode: str = "RGB", noise: int = 64, side: int = SIDE, frames: int = 1, seed: int = 1, **fields: object
) -> bytes:
    """Returns the file of a square picture. noise: number of squares on a side; few squares keep the file small."""
    small = np.random.default_rng(seed).integers(0, 256, (noise, noise, 3), np.uint8)
    image = Image.fromarray(small).resize((side, side), Image.Resampling.NEAREST)
    image = Image.fromarray(np.asarray(image)[:, :, 0].astype(np.uint16)) if mode == "I;16" else image.convert(mode)
    out = io.BytesIO()
    if frames > 1:
        fields |= {"save_all": True, "append_images": [Image.new(image.mode, image.size, i) for i in range(1, frames)]}
    image.save(out, kind, **fields)
    return out.getvalue()


def medium(n: int, kind: str = "PNG", noise: int = 64, **fields: object) -> bytes:
    return shown(*(file_of(kind, noise=noise, side=MEDIUM, seed=seed, **fields) for seed in range(n)))


def document(n: int) -> bytes:
    """Returns a request with a PDF of n pages, drawn as large as the encoder can see."""
    pages = [Image.new("RGB", (1700, 2200), (i, 99, 200)) for i in range(n)]
    out = io.BytesIO()
    pages[0].save(out, "PDF", save_all=True, append_images=pages[1:])
    data = "data:application/pdf;base64," + base64.b64encode(out.getvalue()).decode()
    content = [{"type": "file", "file": {"filename": "a.pdf", "file_data": data}}, {"type": "text", "text": "?"}]
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 4}).encode()


def shown(*files: bytes) -> bytes:
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(one).decode()}}
        for one in files
    ]
    content = [*parts, {"type": "text", "text": "What is the code?"}]
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 4}).encode()


def said(text: str, more: str = "") -> bytes:
    return b'{"max_tokens":4,"messages":[{"role":"user","content":"' + text.encode() + b'"}]' + more.encode() + b"}"


BODIES: dict[str, Callable[[], bytes | list[bytes]]] = {
    "49 MP JPEG": lambda: shown(file_of("JPEG", quality=80)),
    "49 MP JPEG, 4:4:4, noise": lambda: shown(file_of("JPEG", noise=1500, quality=70, subsampling=0)),
    "49 MP PNG": lambda: shown(file_of("PNG", compress_level=1)),
    "49 MP PNG with transparency": lambda: shown(file_of("PNG", "RGBA", compress_level=1)),
    "two of 49 MP": lambda: shown(file_of("PNG", compress_level=1), file_of("JPEG", quality=80)),
    "28 of 3.5 MP": lambda: medium(28, compress_level=1),
    "28 of 3.5 MP, JPEG, noise": lambda: medium(28, "JPEG", 900, quality=70),
    "64 of 1.5 MP": lambda: shown(*(file_of("PNG", side=1220, seed=i, compress_level=1) for i in range(64))),
    "49 MP, 16 bit": lambda: shown(file_of("PNG", "I;16", compress_level=1)),
    "49 MP, CMYK": lambda: shown(file_of("JPEG", "CMYK", quality=70)),
    "49 MP, progressive": lambda: shown(file_of("JPEG", quality=70, progressive=True)),
    "49 MP, grey with transparency": lambda: shown(file_of("PNG", "LA", compress_level=1)),
    "49 MP GIF, animated": lambda: shown(file_of("GIF", "P", frames=3)),
    "49 MP WebP": lambda: shown(file_of("WEBP", quality=30, method=0)),
    "12 MP WebP, animated": lambda: shown(file_of("WEBP", side=3500, frames=3, quality=30, method=0)),
    "28 pages of a PDF": lambda: document(28),
    "60 MiB text": lambda: said("word " * (12 * MIB)),
    "20 M {}": lambda: said("x", ',"chat_template_kwargs":{"a":[' + ",".join(["{}"] * 20_000_000) + "]}"),
    "1 M logit_bias": lambda: said("x", ',"logit_bias":{' + ",".join(f'"t{i}":1' for i in range(1_000_000)) + "}"),
    "64 MiB of base64": lambda: said("x", ',"x":"data:image/png;base64,' + "A" * (63 * MIB) + '"'),
    "20 MiB of base64, no picture": lambda: shown(os.urandom(20 * MIB - 99)),
    "30 M brackets": lambda: said("x", ',"x":' + "[" * 30_000_000 + "]" * 30_000_000),
    "hostile forms": lambda: [json.dumps({**json.loads(said("x")), "max_tokens": 64, **form}).encode()
                              for form in HOSTILE.values()],
}  # fmt: skip


def kib(process: int, name: str) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def watched(url: str, over: threading.Event, waits: dict[str, list[float]]) -> None:
    with httpx.Client(base_url=url, timeout=300) as client:
        n = 0
        while not over.is_set():
            n += 1
            body = {"messages": [{"role": "user", "content": f"Hello {n}"}], "max_tokens": 2}
            picture = shown(file_of("PNG", noise=8, side=64, seed=n))  # a new picture, not in the encoder's cache
            asks = {
                "health": lambda: client.get("/health"),
                "plain": lambda b=body: client.post(CHAT, json=b),
                "picture": lambda p=picture: client.post(CHAT, content=p),
            }
            for what, ask in asks.items():
                began = time.monotonic()
                ask().raise_for_status()
                waits[what].append(time.monotonic() - began)
            time.sleep(0.02)


def longest(url: str, work: Callable[[], object]) -> dict[str, float]:
    over, waits = threading.Event(), defaultdict[str, list[float]](lambda: [0.0])
    other = threading.Thread(target=watched, args=(url, over, waits))
    other.start()
    work()
    over.set()
    other.join()
    return {what: round(max(seconds), 3) for what, seconds in waits.items()}


def sent(server: Server, bodies: list[bytes], answers: list[httpx.Response], took: list[float]) -> None:
    began = time.monotonic()
    answers += [server.client.post(CHAT, content=body) for body in bodies]
    took[0] = time.monotonic() - began


def main() -> None:
    chosen = sys.argv[1:] or list(BODIES)
    for name in chosen:
        made = BODIES[name]()
        bodies = made if isinstance(made, list) else [made]
        with serving(dict(os.environ), "--memory", "64MiB", "--ctx", "8192") as server:
            server.text([{"role": "user", "content": "Hello"}])
            process = server.told["pid"]
            Path(f"/proc/{process}/clear_refs").write_text("5")
            before, answers, took = kib(process, "VmRSS"), [], [0.0]

            waits = longest(server.url, functools.partial(sent, server, bodies, answers, took))
            grown = (kib(process, "VmHWM") - before) / 1024
            idle = longest(server.url, lambda took=took: time.sleep(max(took[0], 1)))
        statuses = dict(Counter(answer.status_code for answer in answers))
        print(
            f"{name}: {sum(map(len, bodies)) / MIB:.1f} MiB, statuses {statuses} after {took[0]:.2f} s, memory "
            f"{grown:+.0f} MiB; longest waits {waits}, without {idle}; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
