"""Negative log-likelihoods of reference answers, computed apart from kvedge: plain llama.cpp, its own cache.

stdin: {"model": path, "exact": bool, "cases": [case, ...]}; with "exact", keys and values are f32 and attention is
computed plainly. A case is {"segments": [{"text": ...} or {"embeddings": file.npy}, ...], "answer": text}. A text is
tokenised on its own; the answer's tokens are those of the last text and the answer together, less those of the text.
stdout: {"nll": [sum per case], "tokens": [number per case]}. The library is the one in LLAMA_CPP_LIB_PATH.
"""

import json
import math
import sys

import llama_cpp.llama_cpp as llama
import numpy as np

SILENT = llama.llama_log_callback(lambda level, text, data: None)


class Plain:
    def __init__(self, path, exact):
        llama.llama_log_set(SILENT, None)
        llama.llama_backend_init()
        self.model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        self.vocab = llama.llama_model_get_vocab(self.model)
        self.n_vocab = llama.llama_vocab_n_tokens(self.vocab)
        params = llama.llama_context_default_params()
        params.n_ctx = 2048
        params.n_threads = params.n_threads_batch = 1
        if exact:
            params.type_k = params.type_v = llama.GGML_TYPE_F32
            params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = llama.llama_init_from_model(self.model, params)

    def tokens(self, text):
        data = text.encode()
        out = (llama.llama_token * (len(data) + 16))()
        return list(out[: llama.llama_tokenize(self.vocab, data, len(data), out, len(out), False, True)])

    def decode(self, at, tokens=None, embeddings=None):
        n = len(tokens if embeddings is None else embeddings)
        batch = llama.llama_batch_init(n, 0 if embeddings is None else embeddings.shape[1], 1)
        batch.n_tokens = n
        for i in range(n):
            if embeddings is None:
                batch.token[i] = tokens[i]
            batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = at + i, 1, 0, i == n - 1
        if embeddings is not None:
            llama.ctypes.memmove(batch.embd, embeddings.ctypes.data, embeddings.nbytes)
        if llama.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        llama.llama_batch_free(batch)
        return at + n

    def nll(self, case):
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)
        at = 0
        for segment in case["segments"]:
            if "text" in segment:
                before = self.tokens(segment["text"])
                at = self.decode(at, tokens=before)
            else:
                at = self.decode(at, embeddings=np.ascontiguousarray(np.load(segment["embeddings"]), np.float32))
        answer = self.tokens(case["segments"][-1]["text"] + case["answer"])[len(before) :]
        total = 0.0
        for token in answer:
            row = llama.llama_get_logits_ith(self.context, -1)
            values = [row[i] for i in range(self.n_vocab)]
            top = max(values)
            total += top + math.log(math.fsum(math.exp(v - top) for v in values)) - values[token]
            at = self.decode(at, tokens=[token])
        return total, len(answer)


def main():
    request = json.load(sys.stdin)
    plain = Plain(request["model"], request["exact"])
    found = [plain.nll(case) for case in request["cases"]]
    print(json.dumps({"nll": [n for n, _ in found], "tokens": [t for _, t in found]}))


if __name__ == "__main__":
    main()
