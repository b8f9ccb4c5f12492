"""What the tests of attach share: a Session with recorded input, and Llamas that read the same input."""

import base64
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import pykvedge
from pykvedge.library.native_plan import replays
from pykvedge.models.vision import TextPiece, Vision
from pykvedge.runtime.sampling import Sampling
from pykvedge.runtime.sequence import Sequence

METHODS = pykvedge.methods()
FEW = ("full", "h2o", "adakv", "elastic", "kvzip", "kvedge")  # different heads, a decode policy, a second pass
METHODS_READ_ONCE = [name for name in METHODS if not replays(pykvedge.plan(name))]
A = "The quick brown fox jumps over the lazy dog and looks at the picture. " * 4
B = "The quick brown cat sleeps under a table, which was not what it had planned for that day. " * 3
THREADS = 1  # with several threads, sums may differ in their last bit


@dataclass
class Turn:
    """One turn: its input as tokens, or as text with markers and images; its answer; the held tokens."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    images: list[Path] = field(default_factory=list)
    answer: str = ""
    held: list[list[list[int]]] = field(default_factory=list)


def held(cache, sequence=0):
    """Returns the held token indices: [stored layer][KV head]."""
    lengths = cache.lengths(sequence)
    return [[cache.tokens(i, h, sequence) for h in range(len(heads))] for i, heads in enumerate(lengths)]


def differing(a, b) -> float:
    """Returns the share of KV pairs that only one of a and b holds. a, b: [layer][head] token indices."""
    only = total = 0
    for layer_a, layer_b in zip(a, b, strict=True):
        for head_a, head_b in zip(layer_a, layer_b, strict=True):
            only += len(set(head_a) - set(head_b))
            total += len(head_a)
    return only / total


def talk(monkeypatch, files, plan, messages, n=8, **settings):
    """Talks with a Session. Returns one Turn for each (text, images) of messages."""
    read, asked, turns = [], [], []
    steps, split = Sequence.steps, Vision.split

    def noting_tokens(self, pieces):
        read.extend(token for piece in pieces if isinstance(piece, TextPiece) for token in piece.tokens)
        return steps(self, pieces)

    def noting_text(self, text, pictures):
        asked.append(text.replace(self.marker, MARKER))
        return split(self, text, pictures)

    with monkeypatch.context() as patched, files.session(plan, **settings) as session:
        patched.setattr(Sequence, "steps", noting_tokens)
        patched.setattr(Vision, "split", noting_text)
        for text, images in messages:
            read.clear(), asked.clear()
            answer = session.ask(text, images, Sampling(max_tokens=n))
            turn = Turn(list(read), "".join(asked), list(images))
            turn.answer = answer.read()
            turn.held = held(session.engine.cache)
            turns.append(turn)
    return turns


MARKER = "<__media__>"  # mtmd_default_marker


def chat_handler(mmproj):
    """Returns llama_cpp's handler for LLaVA, changed to send the text without a template."""
    from llama_cpp.llama_chat_format import Llava15ChatHandler

    class Verbatim(Llava15ChatHandler):
        DEFAULT_SYSTEM_MESSAGE = None
        CHAT_FORMAT = "{{ messages[0].content[-1].text }}"

    return Verbatim(clip_model_path=str(mmproj), verbose=False)


def content_of(text, images):
    """Returns the content of a message: the images first, then the text."""
    urls = ["data:image/png;base64," + base64.b64encode(Path(p).read_bytes()).decode() for p in images]
    return [*({"type": "image_url", "image_url": {"url": u}} for u in urls), {"type": "text", "text": text}]


NEAR = 0.01  # where the best two logits (about 8) are nearer, rounding decides


class Choices:
    """A logits processor of llama_cpp: notes the chosen tokens until the best two logits come nearer than NEAR."""

    def __init__(self):
        self.sure, self.near, self._start = [], False, None

    def __call__(self, ids, logits):
        start = self._start = len(ids) if self._start is None else self._start
        second, best = np.partition(logits, -2)[-2:]
        if not self.near:
            self.sure, self.near = [int(token) for token in ids[start:]], bool(best - second < NEAR)
        return logits


def chat(llm, text, images, n=8, choices=None):
    """Returns the answer of a Llama with `chat_handler`. text: a prompt with MARKER that begins with the BOS token."""
    bos = llm.detokenize([llm.token_bos()], special=True).decode()
    message = {"role": "user", "content": content_of(text.removeprefix(bos), images)}
    done = llm.create_chat_completion(
        [message], max_tokens=n, temperature=0.0, repeat_penalty=1.0, logits_processor=[choices] if choices else None
    )
    return done["choices"][0]["message"]["content"]


def complete(llm, prompt, n=8):
    """Returns the answer to a prompt: a text, or a list of tokens."""
    return llm.create_completion(prompt, max_tokens=n, temperature=0.0)["choices"][0]["text"]


def profiles(profile_file, files, method):
    """Returns the profile files that a method needs, or None when the method needs no profile."""
    return [profile_file(files.model, kind) for kind in pykvedge.plan(method).profile_kinds().values()] or None


def case_of(files, method, messages, profile_file, budget=0.4):
    """Returns a conversation for device_worker.py. files: a TinyModel. messages: (text, images)."""
    plan = pykvedge.plan(method, None if method == "full" else budget)
    profile = profiles(profile_file, files, method)
    return {
        "model": str(files.model),
        "mmproj": files.mmproj and str(files.mmproj),
        "plan": plan.to_json(),
        "profile": profile and [str(file) for file in profile],
        "messages": [(text, [str(image) for image in images]) for text, images in messages],
    }


@contextmanager
def llama(files, method, budget=None, *, profile=None, images=False, kept=None, **options):
    """Yields (llm, attachment) for a tiny model. kept: keyword arguments of attach about whole rows."""
    from llama_cpp import Llama

    settings = {"n_ctx": 4096, "n_threads": THREADS, "n_threads_batch": THREADS, "verbose": False, **options}
    if images:
        settings["chat_handler"] = chat_handler(files.mmproj)
    llm = Llama(str(files.model), **settings)
    try:
        yield llm, pykvedge.attach(llm, method, budget, profile=profile, **(kept or {}))
    finally:
        llm.close()
