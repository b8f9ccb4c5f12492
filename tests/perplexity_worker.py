"""Negative log-likelihoods of reference answers, computed without kvedge: plain llama.cpp with its cache.

stdin: {"model": path, "exact": bool, "cases": [case, ...]}. "exact": f32 keys and values, no flash attention. A case is
{"segments": [{"text": ...} or {"embeddings": file.npy}, ...], "answer": text}. Each text is tokenised alone. The last
text and the answer are also tokenised together: the tokens after the text's tokens are the answer's.
stdout: {"nll": [sum per case], "tokens": [number per case]}. The library is LLAMA_CPP_LIB_PATH's.
"""

import json
import math
import sys

import batches
import numpy as np
from batches import llama


class Plain:
    def __init__(self, path, exact):
        model = batches.open_model(path)
        self.vocab = llama.llama_model_get_vocab(model)
        self.context = batches.open_context(model, n_ctx=2048, **(batches.EXACT if exact else {}))

    def decode(self, at, tokens=(), rows=None):
        end = at + len(tokens if rows is None else rows)
        batches.decode(self.context, range(at, end), tokens, rows)
        return end

    def nll(self, case):
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)
        at = 0
        for segment in case["segments"]:
            if "text" in segment:
                before = batches.tokenize(self.vocab, segment["text"])
                at = self.decode(at, tokens=before)
            else:
                at = self.decode(at, rows=np.load(segment["embeddings"]))
        answer = batches.tokenize(self.vocab, case["segments"][-1]["text"] + case["answer"])[len(before) :]
        total = 0.0
        for token in answer:
            values = batches.logits(self.context).tolist()
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
