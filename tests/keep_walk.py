"""A random walk over conversations with whole rows, compared with contexts that read everything again.

As a program, for tests that limit files: `keep_walk.py`, with a JSON object on stdin (see `main`).
"""

import json
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import keeping
from contexts import TinyContext, random_tokens
from keeping import Talk

import pykvedge
from pykvedge.native.calls import call

N_SEQ, LONGEST = 4, 600
METHODS = ("snapkv", "h2o", "knorm", "kvedge", "lookm")


class EndedError(Exception):
    """No conversation is left for the next operation."""


@dataclass
class Walk:
    """The state of a walk. places: (place, folder) pairs for whole rows; most, kv_type: their limit and type.

    given_up: the problems that ended conversations.
    """

    context: TinyContext
    other: TinyContext
    places: list[tuple[str, str]]
    seed: int
    talks: dict[int, Talk] = field(default_factory=dict)
    compared: int = 0
    given_up: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.most, self.placed, self.kv_type = 0, False, "f16"

    def talk(self) -> Talk:
        """Returns a random conversation, new if needed. Raises EndedError when its whole rows were given up at once."""
        i = self.rng.randrange(N_SEQ)
        if i in self.talks:
            return self.talks[i]
        self.talks[i] = made = Talk(self.context, i)
        made.say(self.tokens(80, 200))
        self.check(made)
        if i not in self.talks:
            raise EndedError
        return made

    def tokens(self, low: int, high: int) -> list[int]:
        return random_tokens(self.rng.randint(low, high), seed=self.rng.randrange(1 << 20))

    def check(self, talk: Talk) -> None:
        """Compares the conversation with a new context. Ends the conversation if its whole rows were given up."""
        problem = self.context.cache.keep_problem(talk.sequence)
        if problem:
            self.given_up.append(problem)
            self.end(talk)
            return
        rounded = 0.0 if self.kv_type == "f16" else 0.1  # rounded rows give other scores
        assert keeping.nearly_equal_pairs(self.context, talk.anew(self.other), talk.sequence, rounded=rounded), talk.log
        self.compared += 1

    def end(self, talk: Talk) -> None:
        self.talks.pop(talk.sequence)
        self.remove_all(talk.sequence)

    def remove_all(self, sequence: int) -> None:
        context = self.context
        assert context.llama.llama_memory_seq_rm(context.memory, sequence, -1, -1)
        context.n[sequence] = 0

    # --------------------------------------------------------------------------------------------------------

    def say(self) -> None:
        talk = self.talk()
        talk.say(self.tokens(1, 50) if talk.answered else self.tokens(2, 50))
        self.check(talk)

    def answer(self) -> None:
        self.talk().answer(self.tokens(1, 12))

    def drafts(self) -> None:
        """Decodes draft tokens of an answer in one batch and keeps some of them, or ends the draft with a removal."""
        talk, tokens = self.talk(), self.tokens(1, 6)
        handle, sequence = self.context.cache.handle, talk.sequence
        call("verify_begin", handle, sequence, len(tokens))
        talk.decode(tokens)
        good = self.rng.randint(0, len(tokens))
        talk.answered = [*talk.answered, *tokens]
        if good < len(tokens) and self.rng.random() < 0.3:
            talk.cut(talk.n - len(tokens) + good)
            return
        call("verify_end", handle, sequence, good)
        self.context.n[sequence] -= len(tokens) - good
        talk.answered = talk.answered[: len(talk.answered) - len(tokens) + good]

    def cut(self) -> None:
        """Removes the end of a conversation, or some tokens in its middle."""
        talk = self.talk()
        read = talk.n - len(talk.answered)
        if read < 70:
            return self.end(talk)
        first = self.rng.randint(30, read - 30)
        if self.rng.random() < 0.5:
            talk.cut(first if self.rng.random() < 0.5 else max(read, talk.n - self.rng.randint(1, 4)))
        else:
            talk.cut(first, first + self.rng.randint(1, 20))
        return None

    def copy(self) -> None:
        talk, to = self.talk(), self.rng.randrange(N_SEQ)
        if to != talk.sequence:
            self.talks.pop(to, None)
            self.remove_all(to)
            self.talks[to] = talk.copy(to)

    def keep(self) -> None:
        """Removes all other sequences."""
        talk = self.talk()
        self.context.llama.llama_memory_seq_keep(self.context.memory, talk.sequence)
        self.talks = {talk.sequence: talk}
        self.context.n = {i: n if i == talk.sequence else 0 for i, n in self.context.n.items()}

    def place(self) -> None:
        if len(self.places) > 1 or not self.placed:
            self.context.cache.keep(*self.rng.choice(self.places), self.most, self.kv_type)
            self.placed = True

    def step(self) -> None:
        for talk in [talk for talk in self.talks.values() if talk.n > LONGEST]:
            self.end(talk)
        operations: list[Callable] = [self.say, self.answer, self.drafts, self.cut, self.copy, self.keep, self.place]
        with suppress(EndedError):
            self.rng.choices(operations, (30, 25, 10, 12, 8, 1, 6))[0]()


def walk(made: Walk, steps: int) -> Walk:
    made.place()
    for i in range(steps):
        try:
            made.step()
        except BaseException as error:
            raise AssertionError(f"step {i} of seed {made.seed}: {error!r}") from error
    return made


def main() -> None:
    """Reads {"model", "places", "seed", "steps", "method", "most", "type"}; prints {"compared", "given_up"}."""
    job = json.loads(sys.stdin.read())
    plan = pykvedge.plan(job.get("method", "snapkv"), 0.3)
    contexts = [TinyContext(job["model"], plan, n_seq=n) for n in (N_SEQ, 1)]
    made = Walk(*contexts, [tuple(place) for place in job["places"]], job["seed"])
    made.most, made.kv_type = job.get("most", 0), job.get("type", "f16")
    walk(made, job["steps"])
    print(json.dumps({"compared": made.compared, "given_up": made.given_up}))
    for context in contexts:
        context.close()


if __name__ == "__main__":
    main()
