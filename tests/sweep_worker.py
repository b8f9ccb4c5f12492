"""Calls every function of kvedge.h with valid arguments, and with one invalid argument at a time.

stdin: {"model": file, "folder": for files, "every": n}; takes every nth invalid value.
stdout: {"called": calls by name, "wrong": lines}. A crash ends it.
The stated size of a caller's buffer is never too large: the library cannot notice that.
"""

import ctypes as c
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
from batches import logits, open_context, open_model, send

from pykvedge.native import abi, libraries

HEADER = Path(__file__).parent.parent / "native" / "include" / "kvedge.h"
NUMBERS = {"int32_t": c.c_int32, "size_t": c.c_size_t, "uint64_t": c.c_uint64, "bool": c.c_bool}
ODD = (-(2**31), -1, 0, 1, 3, 64, 75, 2**31 - 1)
TEXTS = (b"", b"x", b"\xff\xfe", b"a" * 5000, b"%s%n", b"nan", b"budget", b"window")
FREES = {"kvedge_detach", "kvedge_plan_free", "kvedge_result_free", "kvedge_encoder_free"}
# parameters that state the size of a caller's buffer
SIZES = {"n_layers", "n_columns", "n_heads", "d_v", "width", "n_settings", "n_note", "n_data", "struct_size"}
VALID = {  # valid numbers, by parameter name; other parameters: 0
    "n_out": 1 << 15, "n_threads": 1, "n_tokens": 12, "n_heads": 2, "n_heads_kv": 1, "d_k": 32, "n_layers": 2,
    "n_columns": 2, "last": 10, "most": 5, "n": 3, "n_rows": 16, "step": 8, "exit_code": 1, "d_v": 32, "width": 64,
    "n_note": 16, "on": 1, "most_bytes": 1 << 20, "struct_size": c.sizeof(abi.Options),
}  # fmt: skip
WORDS = {"member": b"position", "key": b"budget", "value": b"0.5", "model": b"m", "name": b"generic"}
SIZED = {"kvedge_stats": abi.Stats, "kvedge_saved": abi.Saved, "kvedge_stage_facts": abi.Facts}


def functions():
    """Yields (result, name, [(type without const, name)]) of every function."""
    text = re.sub(r"//[^\n]*", "", HEADER.read_text())
    for result, name, given in re.findall(r"KVEDGE_API\s+([^;(]*?)\b(kvedge_\w+)\(([^;]*?)\);", text):
        plain = re.sub(r"\bconst\b|\bstruct\b|\s+", " ", given.replace("*", " * "))
        parts = [part.split() for part in plain.split(",") if part.split() != ["void"]]
        yield result.replace("const", "").strip(), name, [("".join(part[:-1]), part[-1]) for part in parts]


class World:
    """A context with a compressed prompt and an answer, and one object of each other kind.

    asked: a second prompt follows, not yet compressed. Otherwise whole rows are stored, and attention is watched.
    """

    def __init__(self, lib, model, folder, every) -> None:
        self.lib, self.model, self.file, self.asked = lib, model, str(folder / "a.kvs").encode(), True
        self.every, self.first = every, 0
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(5, 300, 100).tolist()
        self.held = []  # keeps arguments of C alive
        self.plan, self.changed, self.encoder = (c.c_void_p() for _ in range(3))
        for plan in (self.plan, self.changed):
            self.good(lib.kvedge_plan_create(c.byref(plan), None))
        self.good(lib.kvedge_encoder_create(c.byref(self.encoder), None))
        self.room = {"void*": (c.c_uint8 * (1 << 20))(), "float*": (c.c_float * (1 << 15))(*[0.5] * (1 << 15))}
        self.room |= {"uint8_t*": (c.c_uint8 * 4096)(), "double*": (c.c_double * 4096)(*[1.0] * 4096)}
        for key, value in ((b"scorer", b"window"), (b"scorer.window", b"4"), (b"budget", b"16")):
            self.good(lib.kvedge_plan_set(self.plan, key, value, None))
        shape = {"n_ctx": 256, "n_ubatch": 128, "n_seq_max": 2, "kv_unified": True}
        self.context, self.empty = open_context(model, **shape), open_context(model, **shape)
        self.cache, self.result = c.c_void_p(), c.c_void_p()
        self.good(lib.kvedge_attach(self.context, self.plan, None, c.byref(self.cache), None))
        arrays = self.value("", "kvedge_arrays*", "")
        self.good(lib.kvedge_compress_arrays(self.plan, arrays, 0, 1, c.byref(self.result), None))
        self.fill()
        self.good(lib.kvedge_compress(self.cache, 0, None))
        self.good(lib.kvedge_save(self.cache, 0, self.file, b"m", None, 0, None))
        self.packed = Path(self.file.decode()).read_bytes()

    @staticmethod
    def good(status) -> None:
        if status:
            raise SystemExit(f"status {status}")

    def fill(self) -> None:
        lib, cache = self.lib, self.cache
        libraries.llama().llama_memory_clear(libraries.llama().llama_get_memory(self.context), True)
        lib.kvedge_take_error(cache, None)
        for call, on in (("set_auto_compress", True), ("keep_saved", False), ("watch", not self.asked)):
            self.good(getattr(lib, f"kvedge_{call}")(cache, on, None))
        self.good(lib.kvedge_set_plan(cache, self.plan, None))
        for sequence in (0, 1):
            self.good(lib.kvedge_set_sequence_plan(cache, sequence, None, None))
        self.good(lib.kvedge_keep(cache, not self.asked, None, 0, 0, None))
        self.decode(0, 60), self.decode(60, 61), self.decode(61, 62)
        if self.asked:
            self.decode(62, 74, [0] * 12)

    def decode(self, first, last, wants=None):
        self.good(send(self.context, range(first, last), self.tokens[first:last], wants=wants))
        return logits(self.context) if not wants else None

    def after(self):
        """Returns the logits of the next two tokens. With `asked`, the first of them compresses the second prompt."""
        at = 74 if self.asked else 62
        return np.array([self.decode(at, at + 1), self.decode(at + 1, at + 2)])

    def keep(self, thing):
        self.held.append(thing)
        return c.addressof(thing)

    def value(self, function, kind, name):
        """Returns a valid argument."""
        own = {
            "kvedge_cache*": self.cache, "kvedge_result*": self.result,
            "kvedge_plan*": self.changed if function.startswith("kvedge_plan_") else self.plan,
            "kvedge_encoder*": self.encoder, "llama_context*": self.empty if function else None,
        }  # fmt: skip
        if kind in own:
            return own[kind]
        if kind.rstrip("*") in SIZED:
            return self.keep(SIZED[kind.rstrip("*")](struct_size=c.sizeof(SIZED[kind.rstrip("*")])))
        if kind == "kvedge_options*":
            options = abi.Options()
            self.good(self.lib.kvedge_options_init(c.addressof(options), c.sizeof(options), None))
            return self.keep(options)
        if kind == "kvedge_arrays*":
            return self.keep(abi.GivenArrays(1, 2, 1, 32, 32, *[c.addressof(self.room["float*"])] * 3, None))
        if kind in ("kvedge_replay*", "kvedge_replay_chunk*"):
            chunk = abi.ReplayChunk(0, 12, 4)
            rows = [c.addressof(self.room["float*"])] * 2
            return self.keep(chunk if "chunk" in kind else abi.GivenReplay(4, 1, *rows, c.pointer(chunk)))
        if kind == "kvedge_image*":
            return self.keep(abi.GivenImage(c.sizeof(abi.GivenImage), c.addressof(self.room["float*"]), 16, 8, 4, 4))
        if kind == "char*":
            return self.keep(c.create_string_buffer(self.file if name == "path" else WORDS.get(name, b"")))
        if function == "kvedge_unpack" and kind == "void*":
            return self.keep(c.create_string_buffer(self.packed))
        if kind.endswith("**"):
            return self.keep(c.c_void_p())
        if kind in self.room and name != "encoder":
            return c.addressof(self.room[kind])
        if kind in ("kvedge_error*", "size_t*", "int32_t*"):
            return self.keep({"k": abi.Error(), "s": c.c_size_t(1 << 20), "i": (c.c_int32 * 4096)(74)}[kind[0]])
        if name == "n_data":
            return len(self.packed)
        return None if "*" in kind or kind == "kvedge_encoder_look" else VALID.get(name, 0)

    def odd(self, kind, name):
        """Returns invalid arguments of this type."""
        if "*" in kind or kind == "kvedge_encoder_look":
            return [None, *(self.keep(c.create_string_buffer(text)) for text in self.some(TEXTS) if kind == "char*")]
        most = VALID.get(name, 0) if name in SIZES else 2**31
        least = 0 if kind in ("bool", "size_t", "uint64_t") else -(2**31)
        return [x for x in ((0, 1) if kind == "bool" else self.some(ODD)) if least <= x <= most]

    def some(self, values):
        """Returns every nth value. The first one changes from call to call."""
        self.first = (self.first + 1) % self.every
        return values[self.first :: self.every]

    def calls(self, function, kinds):
        """Yields lists of arguments: all valid, then with one invalid argument."""
        for i, (kind, name) in [(-1, ("", "")), *enumerate(kinds)]:
            for odd in self.odd(kind, name) if kind else [None]:
                given = [self.value(function, *one) for one in kinds]
                if i >= 0:
                    given[i] = odd
                if function != "kvedge_last_words" or not all(given[:3]):  # would install crash handlers
                    yield given


def what_is_wrong(world, function, result, kinds, given, expected):
    """Calls the function. Returns what is wrong with its status, message or later logits; "" if all is right."""
    code = getattr(world.lib, function)(*given)
    errors = [at for (kind, _), at in zip(kinds, given, strict=True) if kind == "kvedge_error*" and at]
    told = [abi.Error.from_address(at) for at in errors]
    failed = result == "kvedge_status" and code != 0
    if failed and not 0 < code < 10:
        return f"status {code}"
    if failed and told and (told[0].status != code or not told[0].message or b"\n" in told[0].message):
        return f"status {code}, of which the message is {told[0].text!r}"
    if not failed:  # the call may have changed the state
        if function == "kvedge_attach" and code == 0:
            world.lib.kvedge_detach(c.c_void_p.from_address(given[3]))
        world.fill()
    found = world.after()
    world.fill()
    off = np.abs(found - expected).max()
    return f"status {code}; what follows is {off:.3g} off" if off else ""


def main() -> None:
    job = json.loads(sys.stdin.read())
    os.chdir(job["folder"])  # some of TEXTS are valid file names
    lib = c.CDLL(libraries.kvedge()._name)
    declared = list(functions())
    for result, name, kinds in declared:
        function = getattr(lib, name)
        function.argtypes = [c.c_void_p if "*" in k or "look" in k else NUMBERS.get(k, c.c_int) for k, _ in kinds]
        function.restype = None if result == "void" else c.c_void_p if "*" in result else NUMBERS.get(result, c.c_int)
    world = World(lib, open_model(job["model"]), Path(job["folder"]), job["every"])
    wrong, called = [], {}
    for asked in (True, False):
        world.asked = asked
        world.fill()
        expected = world.after()
        world.fill()
        for result, name, kinds in declared:
            if name in FREES or not kinds:
                getattr(lib, name)(*[None for _ in kinds])
                called[name] = 1
            elif asked or ("kvedge_cache*", "kv") in kinds:
                for given in world.calls(name, kinds):
                    why = what_is_wrong(world, name, result, kinds, given, expected)
                    wrong += [f"{name}{given}: {why}"] if why else []
                    called[name] = called.get(name, 0) + 1
            world.held.clear()
    print(json.dumps({"called": called, "wrong": wrong}))


if __name__ == "__main__":
    main()
