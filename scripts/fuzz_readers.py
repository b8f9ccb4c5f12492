"""The targets of the Python fuzzers. A target reads bytes and returns, or raises one of kvedge's errors.

Any other exception is a finding. Half of the inputs are changed by their structure (fuzz_mutants.py).
"""

import contextlib
import functools
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from fuzz import FIRST, SEEDS
from fuzz_mutants import mutate_header, mutate_json, mutate_session
from PIL import BmpImagePlugin, GifImagePlugin, ImageOps, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

import pykvedge
from kvedge_lab.eval import datasets
from pykvedge.errors import KvedgeError
from pykvedge.library import native_plan
from pykvedge.models import gguf, images, imagetokens, modelfile, shape
from pykvedge.plans import making, plan, profile
from pykvedge.runtime import sampling, sessionfile
from pykvedge.serve import anthropic, asking, reading, responses, tools, wire
from pykvedge.serve.pictures import Sources

PLUGINS = (BmpImagePlugin, GifImagePlugin, ImageOps, JpegImagePlugin, PngImagePlugin, WebPImagePlugin)
FILE = 1 << 40  # the stated file size: large enough for all tensors
LENGTHS = (1, 7, 64, 5000)
WHOLE = 4 << 20  # bytes of a file with a header of tests/fuzz; its tensors have fewer
ONE = sampling.Sampling(max_tokens=1)


def gguf_header(data: bytes) -> None:
    """Reads a language model's header, as chat and plan do."""
    header = gguf.header_of(Path("model.gguf"), data, FILE)
    if header is None:
        return
    modelfile.facts(modelfile.check_model(header))
    sizes = shape.ModelShape.of(header)
    assert min(sizes.compute(512), sizes.kv_per_token(2.0), sizes.work_space(1)) >= 0
    shape.shares_cache(header)
    for tensor in header.tensors.values():
        gguf.tensor_bytes(tensor)


@functools.cache
def _models() -> list[gguf.Header]:
    found = [gguf.header_of(path, path.read_bytes(), FILE) for path in sorted((SEEDS / "gguf").iterdir())]
    return [header for header in found if header is not None]


def mmproj_header(data: bytes) -> None:
    """Reads an image encoder's header, as chat does, for several models, and counts the tokens of images."""
    header = gguf.header_of(Path("mmproj.gguf"), data, FILE)
    for model in _models() if header is not None else ():
        with contextlib.suppress(KvedgeError):
            used = modelfile.check_mmproj(header, model)
            limits = imagetokens.token_limits(used)
            for width, height in ((1, 1), (336, 336), (4000, 30)):
                assert imagetokens.image_grid(used, width, height, limits).n_tokens >= 0


def plan_json(data: bytes) -> None:
    """Reads a plan, as --plan does. libkvedge must compute the same counts."""
    found = plan.Plan.from_json(data.decode("utf-8", "replace"))
    assert plan.Plan.from_json(found.to_json()) == found
    for n in LENGTHS:
        kept = found.count(n)
        assert 1 <= kept <= n and sum(found.protected(n, kept)) <= kept
        assert native_plan.plan_budget(found, n) == kept


def profile_json(data: bytes) -> None:
    found = profile.Profile.from_json(data.decode("utf-8", "replace"))
    again = profile.Profile.from_json(found.to_json())
    assert again.kind == found.kind and again.values.shape == found.values.shape
    assert len(found.table.values) == len(found.values)
    with contextlib.suppress(KvedgeError):
        profile.for_arrays(making.plan("knorm", 0.5, allocator="heads"), found, 2, 4, 2)


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="kvedge-fuzz-"))
    (folder / "images").mkdir()
    for place in (folder, folder / "images"):
        (place / "a.png").write_bytes((SEEDS / "image" / "grey.png").read_bytes())
    return folder


def data_set(data: bytes) -> None:
    """Reads a file of samples, as eval does: as JSONL, and in the other forms."""
    for name in ("set.jsonl", "set.json"):
        path = _folder() / name
        path.write_bytes(data)
        with contextlib.suppress(KvedgeError):
            for sample in datasets.load(path):
                sample.digest()
                assert sample.score("an answer") is None or 0 <= sample.score("an answer") <= 1
                f"{sample.id}{sample.task}{sample.answer}".encode()


def session_note(data: bytes) -> None:
    """Reads the note of a session file. ValueError means that the note is invalid."""
    try:
        note = sessionfile.Note.decode(data)
    except ValueError as error:
        assert type(error) is ValueError, error
        return
    again = sessionfile.Note.decode(note.encode())
    assert again.encode() == note.encode() and again.plan == note.plan


def image_file(data: bytes) -> None:
    picture = images.load_picture(data)
    assert len(picture.rgb) == 3 * picture.width * picture.height > 0


@functools.cache
def _defaults() -> asking.Defaults:
    return asking.Defaults(making.plan("lookm", 0.5), sampling.Sampling(), Sources())


def wire_format(data: bytes) -> None:
    """Reads the body of a request, as the server does, in each of the three forms."""
    with contextlib.suppress(KvedgeError):
        given = wire.parsed(wire.ChatRequest, data)
        asking.is_quick(given, _defaults())
        asking.request_of(given, _defaults())
    with contextlib.suppress(KvedgeError):
        given = anthropic._of_messages(wire.parsed(anthropic.MessagesRequest, data))
        asking.request_of(given, _defaults())
    with contextlib.suppress(KvedgeError):
        given = responses._of_responses(wire.parsed(responses.ResponsesRequest, data))
        asking.request_of(given, _defaults())
    with contextlib.suppress(KvedgeError):
        asking.plan_of(wire.parsed(wire.Compression, data), _defaults().plan)


def tool_calls(data: bytes) -> None:
    """Searches an answer for tool calls, whole and in pieces. Both must find the same calls."""
    text = data.decode("utf-8", "replace")
    whole, pieces = (reading.JsonCallReading({"look", "add"}) for _ in range(2))
    whole.finish(text)
    for i in range(0, len(text), 7):
        pieces.feed(text[i : i + 7])
    pieces.finish()
    assert whole.parsed.text == pieces.parsed.text and len(whole.parsed.text) <= len(text)
    for one, other in zip(whole.parsed.calls, pieces.parsed.calls, strict=True):
        assert (one.name, one.arguments) == (other.name, other.arguments)
        assert one.name in ("look", "add") and isinstance(tools.arguments_of(one), dict)


def _whole(name: str, header: bytes) -> Path:
    """Writes a GGUF file with this header and zeros as tensors, up to WHOLE bytes. Returns its path."""
    path = _folder() / name
    path.write_bytes(header)
    os.truncate(path, max(len(header), WHOLE))
    return path


@functools.cache
def whole_model(kind: str) -> Path:
    return _whole(f"{kind}.gguf", (SEEDS / "gguf" / kind).read_bytes())


def _answer(model: Path, mmproj: Path | None, pictures: list[Path]) -> None:
    with pykvedge.Session(model, mmproj, pykvedge.plan("full"), threads=1, n_ctx=256) as session:
        session.ask("What is this?", pictures, ONE).read()


def model_file(data: bytes) -> None:
    """Loads a language model with llama.cpp, and answers with it."""
    _answer(_whole("model.gguf", data), None, [])


def mmproj_file(data: bytes) -> None:
    """Loads an image encoder with llama.cpp, and answers about a picture."""
    model = whole_model("qwen2vl" if b"qwen2vl_merger" in data else "llava")
    _answer(model, _whole("mmproj.gguf", data), [_folder() / "a.png"])


@functools.cache
def _session() -> pykvedge.Session:
    return pykvedge.Session(whole_model("llava"), None, pykvedge.plan("lookm", 0.5), threads=1, n_ctx=256)


def session_file(data: bytes) -> None:
    """Loads a saved conversation and asks a question in it."""
    path = _folder() / "talk.kvs"
    path.write_bytes(data)
    _session().load(path)
    _session().ask("And?", [], ONE).read()


# target -> (function under test, function that changes inputs by their structure)
TARGETS: dict[str, tuple[Callable[[bytes], None], Callable[[bytes, random.Random], bytes] | None]] = {
    "gguf": (gguf_header, mutate_header),
    "mmproj": (mmproj_header, mutate_header),
    "plan_json": (plan_json, mutate_json),
    "profile": (profile_json, mutate_json),
    "dataset": (data_set, mutate_json),
    "note": (session_note, mutate_json),
    "image": (image_file, None),
    "model_file": (model_file, mutate_header),
    "mmproj_file": (mmproj_file, mutate_header),
    "session_file": (session_file, mutate_session),
    "wire": (wire_format, mutate_json),
    "tools": (tool_calls, mutate_json),
}


def first_inputs(target: str) -> list[Path]:
    """Returns the first inputs of a target."""
    return sorted(path for path in (SEEDS / FIRST.get(target, target)).iterdir() if path.is_file())
