"""Reads prompts in pieces, with the rows on the host or on devices, and prints the tokens that each head keeps.

stdin: one JSON object: "model", "plans", keys of backends.prepare, "devices": "none" or "all" (where the rows are).
"pieces": read only this number of pieces of one prompt, print nothing.
stdout: a JSON line for each plan: "held" token indices [sequence][layer][head] after the first answer tokens, and of
sequence 0 again after a second message; "device_bytes" of sequence 0 after each piece of its prompt.
"""

import json
import sys

import backends
from batches import send
from contexts import TinyContext, random_tokens

from pykvedge.library import libkvedge
from pykvedge.native.abi import DEVICES_ALL, DEVICES_NONE
from pykvedge.plans.plan import Plan

SEQUENCES = 4


class Prompts(TinyContext):
    def __init__(self, model, plan, devices):
        super().__init__(model, None, n_seq=SEQUENCES)
        self.cache = libkvedge.Cache(self.context, plan, "f32", devices=devices, auto_compress=True)
        self.left = {s: random_tokens(900, seed=s) for s in range(SEQUENCES)}

    def _watch_stock(self, params):
        """Does nothing: the weights are on a device, where this process cannot read them."""

    def _adjust(self, params):
        params.n_ubatch = 128

    def read(self, *parts, wants=False, mixed=False):
        """Reads parts (sequence, number of tokens) in one batch. wants: compute logits of each part's last token."""
        items = []
        for sequence, n in parts:
            for i in range(n):
                logits = wants and i == n - 1
                items.append((i if mixed else 0, self.left[sequence].pop(), self.n[sequence], sequence, logits))
                self.n[sequence] += 1
        if mixed:
            items.sort(key=lambda item: item[0])
        _, tokens, positions, sequences, logits = zip(*items, strict=True)
        assert send(self.context, positions, tokens, sequences=sequences, wants=logits) == 0
        return self.cache.stats(0).device_bytes

    def remove(self, sequence, first, last):
        assert self.llama.llama_memory_seq_rm(self.memory, sequence, first, last)


def walk(context):
    """Reads pieces shorter and longer than a window and a ubatch; shares batches, removes tokens, copies a sequence."""
    context.cache.expect(453, 0)
    bytes_ = [context.read((0, n)) for n in (150, 300, 1, 2)]
    context.read((1, 60), (2, 40))
    context.read((1, 3), (2, 90))
    context.read((1, 50))
    context.read((1, 2))
    context.remove(1, 100, -1)  # the end
    context.n[1] = 100
    context.read((1, 70))
    context.read((2, 200))  # the buffers grow
    context.remove(2, 20, 35)  # the middle
    context.read((2, 64), (1, 5))
    context.llama.llama_memory_seq_cp(context.memory, 0, 3, -1, -1)
    context.n[3] = context.n[0]
    bytes_.append(context.read((0, 9), (3, 30)))
    context.read((3, 40), (2, 3), mixed=True)  # tokens of two sequences alternate: attention runs on the host
    context.read((0, 40))
    context.read((2, 6))  # the prompts of sequences 1 and 3 end here
    context.read(*((s, 2) for s in range(SEQUENCES)), wants=True)
    context.read(*((s, 1) for s in range(SEQUENCES)), wants=True)
    held = [context.held(s) for s in range(SEQUENCES)]
    context.read((0, 40))  # a second message, after the kept tokens of the first message
    context.read((0, 70), wants=True)
    context.read((0, 1), wants=True)
    return {"held": [*held, context.held(0)], "device_bytes": bytes_}


def main():
    job = json.load(sys.stdin)
    backends.prepare(job)
    for text in job["plans"]:
        context = Prompts(job["model"], Plan.from_json(text), DEVICES_ALL if job["devices"] == "all" else DEVICES_NONE)
        if "pieces" in job:
            context.cache.expect(128 * job["pieces"])
            for _ in range(job["pieces"]):
                context.read((0, 128))
        else:
            print(json.dumps(walk(context)), flush=True)
        context.close()


if __name__ == "__main__":
    main()
