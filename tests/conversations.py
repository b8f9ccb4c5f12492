"""What the tests of session files share: plans, questions, and changes of a file's parts."""

import struct
import zlib

import pykvedge
from pykvedge.runtime.sampling import Sampling

SHORT = Sampling(max_tokens=10)
LONG = Sampling(max_tokens=70)  # longer than one block of generated rows
WORDS = "The quick brown fox jumps over the lazy dog and looks at the picture. " * 3
PLANS = {
    "full": ("full", None, {}),
    "merged": ("lookm", 0.25, {}),
    "biased": ("lookm", 0.25, {"reducer": "averaged", "reducer.bias": "mass"}),
    "ragged": ("snapkv", 0.3, {"allocator": "ada", "reducer": "weighted"}),
    "elastic": ("elastic", 0.3, {}),
    "prefixkv": ("prefixkv", 0.3, {}),
    "sliding": ("h2o", 0.3, {"decode": "sliding"}),
    "scored": ("h2o", 0.3, {"decode": "heavy-hitter"}),
    "covered": ("h2o", 500, {"decode": "sliding"}),  # the budget holds the whole prompt, whose block is cut later
}


def a_plan(name):
    method, budget, settings = PLANS[name]
    return pykvedge.plan(method, budget, **settings)


def say(session, text, images=(), sampling=SHORT):
    answer = session.ask(text, images, sampling)
    answer.read()
    return answer.report


def fingerprint_of(file):
    data = file.read_bytes()
    return data[32 : 32 + struct.unpack_from("<I", data, 12)[0]].decode()


def reframed(data, **changes):
    """Returns the file's data with another version, model, note or payload, and with correct lengths and checksums."""
    n_model, n_note = struct.unpack_from("<I", data, 12)[0], struct.unpack_from("<Q", data, 16)[0]
    end = 32 + n_model + n_note
    model, note, payload = data[32 : 32 + n_model], data[32 + n_model : end], data[end + 4 : -4]
    model, note, payload = (changes.get(*one) for one in (("model", model), ("note", note), ("payload", payload)))
    sizes = len(model), len(note), len(payload)
    head = data[:8] + struct.pack("<IIQQ", changes.get("version", 1), *sizes) + model + note
    return head + struct.pack("<I", zlib.crc32(head)) + payload + struct.pack("<I", zlib.crc32(payload))
