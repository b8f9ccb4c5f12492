"""The child process that llama.cpp's grammars run in (runtime/grammar.py): they may abort, or take all time and memory.

It loads the vocabulary of a model and answers a line of JSON for each line of JSON:
{"model": path} -> {"n_vocab"}; {"grammar": text} or {"schema": text} -> {}; {"take": token} -> {} if the grammar allows
it there, else {"allowed": base64 of a bit per token}, with the first token in the highest bit; or {"error": why}.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import re
import sys
import tempfile
from typing import Any, BinaryIO

import numpy as np

from pykvedge.errors import GrammarError
from pykvedge.native import llamacpp
from pykvedge.runtime import schema_converter

_MOST_SHOWN = 60  # characters of a grammar in a message


class Follower:
    """Follows a grammar through an answer, token by token."""

    def __init__(self, path: str, said: BinaryIO) -> None:
        """path: of the model. said: the file that stderr goes to."""
        self._said, self._grammar = said, None
        llama = self._llama = llamacpp.start(verbose=False, vision=False)
        params = llama.llama_model_default_params()
        params.vocab_only, params.n_gpu_layers = True, 0
        self._no_devices = (ctypes.c_void_p * 1)(None)
        params.devices = ctypes.cast(self._no_devices, ctypes.c_void_p)
        model = llama.llama_model_load_from_file(os.fsencode(path), params)
        if not model:
            raise GrammarError("the model's vocabulary cannot be loaded again")
        self._vocab = llama.llama_model_get_vocab(model)
        self.n_vocab = llama.llama_vocab_n_tokens(self._vocab)
        unseen = llama.LLAMA_TOKEN_ATTR_CONTROL | llama.LLAMA_TOKEN_ATTR_UNKNOWN
        attributes = [llama.llama_vocab_get_attr(self._vocab, token) for token in range(self.n_vocab)]
        ends = [llama.llama_vocab_is_eog(self._vocab, token) for token in range(self.n_vocab)]
        # a special token is no text of an answer, though grammars take it for its name
        self._unseen = (np.array(attributes) & unseen != 0) & ~np.array(ends, bool)

    def parse(self, grammar: str) -> None:
        start = self._said.seek(0, os.SEEK_END)
        try:
            data = grammar.encode()
        except UnicodeEncodeError:
            raise GrammarError("it has characters that are none") from None
        with llamacpp.collected_errors() as lines:
            self._grammar = self._llama.llama_sampler_init_grammar(self._vocab, data, b"root")
        if not self._grammar:
            self._said.seek(start)
            found = re.search(r"error parsing grammar: (.*)", self._said.read(4096).decode("utf-8", "replace"))
            why = found[1] if found else llamacpp.reason(lines, "llama.cpp does not say why")
            raise GrammarError(why if len(why) <= 2 * _MOST_SHOWN else why[: 2 * _MOST_SHOWN] + " ...")

    def take(self, token: int) -> dict[str, str]:
        if not self._unseen[token] and self._applied(np.array([token]))[0]:
            if not self._llama.llama_vocab_is_eog(self._vocab, token):
                self._llama.llama_sampler_accept(self._grammar, token)
            return {}
        allowed = self._applied(np.arange(self.n_vocab)) & ~self._unseen
        return {"allowed": base64.b64encode(np.packbits(allowed).tobytes()).decode()}

    def _applied(self, tokens: np.ndarray) -> np.ndarray:
        """Tells which tokens the grammar allows next: bool, as many."""
        llama = self._llama
        data = (llama.llama_token_data * len(tokens))()
        view = np.frombuffer(data, [("id", "i4"), ("logit", "f4"), ("p", "f4")])
        view["id"] = tokens
        array = llama.llama_token_data_array(data, len(tokens), -1, False)
        llama.llama_sampler_apply(self._grammar, ctypes.byref(array))
        return np.isfinite(view["logit"])


def converted(schema: str) -> str:
    """Makes a grammar of a JSON schema."""
    from llama_cpp import llama_grammar

    try:
        return schema_converter.convert(schema, llama_grammar)
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    except Exception as error:  # it checks by assertions, or by failing
        what = str(error) if isinstance(error, AssertionError | ValueError) else f"{type(error).__name__}: {error}"
        raise GrammarError(" ".join(what[:200].split()) or "it is none that can be converted") from None


def _answer(follower: Follower | None, request: dict[str, Any]) -> dict[str, Any]:
    if follower is None:
        return {"error": "no model was named"}
    if "take" in request:
        return follower.take(request["take"])
    follower.parse(converted(request["schema"]) if "schema" in request else request["grammar"])
    return {}


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    follower = None
    with tempfile.TemporaryFile() as said, open(os.devnull, "wb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 1)
        os.dup2(said.fileno(), 2)  # llama.cpp writes there what is wrong with a grammar
        for line in sys.stdin.buffer:
            request, answer = json.loads(line), {}
            try:
                if "model" in request:
                    follower = Follower(request["model"], said)
                    answer = {"n_vocab": follower.n_vocab}
                else:
                    answer = _answer(follower, request)
            except GrammarError as refused:
                answer = {"error": str(refused)}
            except MemoryError:
                answer = {"error": "it takes too much memory"}
            with contextlib.suppress(BrokenPipeError):
                answers.write(json.dumps(answer).encode() + b"\n")
                answers.flush()


if __name__ == "__main__":
    main()
