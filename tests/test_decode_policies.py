"""Decode policies in the running model: the held rows, token by token, against the definitions."""

import numpy as np
import pytest
from choosing import crossed, whole
from contexts import TinyContext, random_tokens

import pykvedge
from pykvedge.plans.plan import Plan
from pykvedge.plans.registry import member, members
from pykvedge.reference.stages.base import DecodeState

POLICIES = list(members("decode"))
PROMPT = 200


@pytest.fixture
def running(closing, tiny):
    def start(plan: Plan | None, kv_type: str = "f16", threads: int = 1) -> TinyContext:
        return closing(TinyContext(tiny("llama", weight="f32").model, plan, kv_type, threads=threads))

    return start


class Simulation:
    """The rows of one KV head, token by token, by the policy's definition. rows: after the compression."""

    def __init__(self, plan: Plan, rows: list[int], n_prompt: int, scores=None) -> None:
        self.policy, self.settings = member("decode", plan.decode), plan.settings("decode")
        self.plan, self.held, self.kept, self.n_prompt, self.generated = plan, list(rows), len(rows), n_prompt, 0
        self.scores = np.zeros(len(rows)) if scores is None else np.asarray(scores, dtype=np.float64)

    def state(self) -> DecodeState:
        recent = self.plan.asked_recent(self.n_prompt, self.kept)
        budget = self.plan.count(self.n_prompt)
        known = (self.n_prompt, self.kept, budget, self.generated, len(self.held), self.plan.sinks, recent)
        return DecodeState(*known, self.scores)

    def read(self, token: int, now: list[int], weights=None) -> None:
        """Adds a token. Then the head must hold `now`. weights: its attention weights [len(now)]."""
        row = self.policy.evict(self.state(), self.settings) if self.generated else None
        if row is not None and self.held[row] in now:  # a tie within the precision of float32?
            gone = [r for r, t in enumerate(self.held) if t not in now]
            assert len(gone) == 1 and self.scores[gone[0]] == pytest.approx(self.scores[row], rel=1e-4)
            row = gone[0]
        if row is not None:
            self.held.pop(row)
            self.scores = np.delete(self.scores, row)
        self.held.append(token)
        self.scores = np.append(self.scores, 0.0) + (0 if weights is None else weights)
        self.generated += 1
        assert now == self.held


def simulate(plan: Plan, rows: list[int], n_prompt: int, generated: range) -> list[int]:
    """Returns the tokens of a head after the last of `generated`, by a policy that needs no scores."""
    simulation = Simulation(plan, rows, n_prompt)
    for token in generated:
        row = simulation.policy.evict(simulation.state(), simulation.settings) if simulation.generated else None
        simulation.read(token, [t for r, t in enumerate(simulation.held) if r != row] + [token])
    return simulation.held


def mean_weights(context, layer: int, head: int, n_heads_kv: int):
    """Returns [n]: the attention of the last token, averaged over the query heads of a KV head."""
    group = context.llama.llama_model_n_head(context.model) // n_heads_kv
    return np.mean([context.cache.attention(layer, head * group + g).astype(np.float64) for g in range(group)], axis=0)


WAYS = crossed(POLICIES, ["uniform", "prefix", "ada"], ["prefix"], ["heavy-hitter"])


@pytest.mark.parametrize("budget", [0.1, *whole(0.4, 90)])  # heavy hitters have a budget of pairs below
@pytest.mark.parametrize(("decode", "allocator"), WAYS)
def test_rows_go_as_the_definition_says(running, decode, budget, allocator):
    plan = pykvedge.plan("h2o", budget, decode=decode, allocator=allocator, sinks=2)
    follow(running, plan, (PROMPT, 121))


@pytest.mark.parametrize("settings", [
    {"decode": "heavy-hitter", "decode.recent": 3},
    {"decode": "heavy-hitter", "decode.recent": 1000, "sinks": 4},
    {"decode": "heavy-hitter", "scorer": "knorm"},  # protects half of the head, as the scorer protects nothing
    {"decode": "heavy-hitter", "scorer": "window", "reducer": "pivotal"},
    {"decode": "heavy-hitter", "scorer.share": "layer", "recent": 5, "sinks": 1},
    {"decode": "heavy-hitter", "budget": 1},
    {"decode": "heavy-hitter", "budget": 250},  # larger than the prompt: the answer may use the rest
    {"decode": "sliding", "budget": 250, "sinks": 1},
], ids=str)  # fmt: skip
def test_heavy_hitters_stay_whatever_chose_the_prompt(running, settings):
    follow(running, pykvedge.plan("h2o", settings.pop("budget", 0.3), **settings), (PROMPT, 90))


@pytest.mark.parametrize("threads", [1, 3])
def test_scores_go_on_with_the_next_prompt(running, threads):
    turns = (PROMPT, 60), (70, 60), (2, 20), (90, 60)
    follow(running, pykvedge.plan("h2o", 0.3, decode="heavy-hitter"), *turns, threads=threads)


def follow(running, plan: Plan, *turns: tuple[int, int], threads: int = 1) -> None:
    """Reads prompts and answers of these lengths, and checks every row of every head.

    The attention of prompt tokens is llama.cpp's: only in the first layer, it is the same after rows were dropped.
    """
    context, stock = running(plan, kv_type="f32", threads=threads), running(None)
    context.cache.watch(True)
    heads = [(i, h) for i in range(2) for h in range(2)]
    old = {head: Simulation(plan, [], 0) for head in heads}
    for n_prompt, n_generated in turns:
        tokens = random_tokens(n_prompt, context.n[0])
        context.decode(tokens)
        stock.decode(tokens)
        scores = {head: received(stock, *head, old[head], n_prompt) for head in heads}
        context.cache.compress()
        for i, h in heads:
            held = context.cache.tokens(i, h)
            old[i, h] = Simulation(plan, held, context.n[0], [scores[i, h][t] for t in held])
            old[i, h].kept += max(0, (plan.budget.pairs or 0) - n_prompt)
        for step in range(n_generated):
            generate(context, old, heads, random_tokens(1, step))
            stock.decode(random_tokens(1, step))
        heads = [head for head in heads if head[0] == 0]


def generate(context, simulations, heads, token) -> None:
    context.decode(token)
    for i, h in heads:
        simulations[i, h].read(context.n[0] - 1, context.cache.tokens(i, h), mean_weights(context, i, h, 2))


def test_scores_follow_their_rows_through_copies_and_cuts(running):
    plan, stock = pykvedge.plan("h2o", 0.3, decode="heavy-hitter"), running(None)
    context = running(plan, kv_type="f32")
    context.cache.watch(True)
    for reader in (context, stock):
        reader.decode(random_tokens(PROMPT))
    context.cache.compress()
    simulations = {}
    for head in (heads := [(i, h) for i in range(2) for h in range(2)]):
        scores, held = received(stock, *head, Simulation(plan, [], 0), PROMPT), context.cache.tokens(*head)
        simulations[head] = Simulation(plan, held, PROMPT, [scores[t] for t in held])
    remove, memory = context.llama.llama_memory_seq_rm, context.memory
    for step in range(90):
        generate(context, simulations, heads, random_tokens(1, step))
        if step % 30 == 10:
            context.llama.llama_memory_seq_cp(memory, 0, 1, -1, -1)
            context.llama.llama_memory_seq_keep(memory, 1)
            context.llama.llama_memory_seq_cp(memory, 1, 0, -1, -1)
        if step % 30 == 20:
            for first, last in ((10, 20), (PROMPT - 8, PROMPT - 3), (context.n[0] - 9, context.n[0] - 4)):
                assert remove(memory, 0, first, last)
                for simulation in simulations.values():
                    stays = [t not in range(first, last) for t in simulation.held]
                    simulation.held = [t for t, stay in zip(simulation.held, stays, strict=True) if stay]
                    simulation.scores = simulation.scores[stays]
            assert context.held() == [[simulations[i, h].held for h in range(2)] for i in range(2)]
    context.llama.llama_memory_clear(memory, True)
    assert context.cache.stats().score_bytes == 0


def received(stock, layer: int, head: int, old: Simulation, n_prompt: int) -> dict[int, float]:
    """Returns {token: attention received} after a prompt whose tokens see the held rows and the prompt."""
    n_tokens = stock.n[0]
    seen = [*old.held, *range(n_tokens - n_prompt, n_tokens)]
    weights = stock.attention[layer][2 * head : 2 * head + 2, :, seen].astype(np.float64)
    weights /= weights.sum(axis=-1, keepdims=True)
    before = np.concatenate([old.scores, np.zeros(n_prompt)])
    return dict(zip(seen, before + weights.sum(axis=1).mean(axis=0), strict=True))


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("distance", [1, 5, 60])
def test_the_place_is_a_setting(running, distance, relative):
    settings = {"decode.distance": distance, "decode.relative": relative}
    plan = pykvedge.plan("h2o", 0.2, decode="fixed-point", **settings)
    context = running(plan)
    context.decode(random_tokens(PROMPT))
    context.cache.compress()
    before = context.held()[0][0]
    for step in range(60):
        context.decode(random_tokens(1, step))
    held = context.held()[0][0]
    assert held == simulate(plan, before, PROMPT, range(PROMPT, PROMPT + 60))
    if relative and distance < 60:  # the newest tokens are never dropped
        assert set(range(PROMPT + 60 - distance + 1, PROMPT + 60)) <= set(held)


@pytest.mark.parametrize("decode", ["sliding", "fixed-point", "ratio", "heavy-hitter"])
def test_a_bound_is_a_bound(running, decode):
    context = running(pykvedge.plan("h2o", 0.2, decode=decode))
    context.decode(random_tokens(PROMPT))
    sizes = []
    for step in range(700):
        context.decode(random_tokens(1, step))
        sizes.append(context.cache.stats().bytes)
    longest = max(n for heads in context.cache.lengths() for n in heads)
    share = 40 if decode in ("sliding", "heavy-hitter") else 0.2 * (PROMPT + 700)
    assert longest <= share + 2
    if decode in ("sliding", "heavy-hitter"):
        assert max(sizes[450:]) <= max(sizes[200:450])  # flat


def test_the_next_prompt_is_compressed_alone(running):
    plan = pykvedge.plan("elastic", 0.2)
    context = running(plan)
    context.decode(random_tokens(PROMPT))
    for step in range(80):
        context.decode(random_tokens(1, step))
    answer = context.cache.lengths()
    context.decode(random_tokens(100, 5))
    context.cache.compress()
    for heads, old in zip(context.cache.lengths(), answer, strict=True):
        assert heads == [n + 32 for n in old]  # a fifth would be 20, but a later message keeps at least 32
    for step in range(80):
        context.decode(random_tokens(1, step))
    n_tokens = PROMPT + 80 + 100 + 80
    assert max(n for heads in context.cache.lengths() for n in heads) <= 0.2 * n_tokens + 3


def test_an_answer_that_is_bounded_already_is_left_alone(running):
    context = running(pykvedge.plan("h2o", 0.2, decode="sliding", reducer="pivotal"))
    context.decode(random_tokens(PROMPT))
    for step in range(90):
        context.decode(random_tokens(1, step))
    held, bytes_ = context.held(), context.cache.stats().bytes
    context.cache.compress()
    assert context.held() == held and context.cache.stats().bytes == bytes_
    context.decode(random_tokens(1, 91))
    assert {n for heads in context.cache.lengths() for n in heads} == {len(held[0][0])}


def test_a_copy_goes_on_like_the_original(running):
    context = running(pykvedge.plan("h2o", 0.2, decode="sliding"))
    context.decode(random_tokens(PROMPT))
    for step in range(90):
        context.decode(random_tokens(1, step))
    memory, held = context.memory, context.held()
    context.llama.llama_memory_seq_cp(memory, 0, 1, -1, -1)
    context.llama.llama_memory_seq_keep(memory, 1)
    context.llama.llama_memory_seq_cp(memory, 1, 0, -1, -1)
    assert context.held() == held
    context.decode(random_tokens(60, 3))  # the next prompt does not change the bounded answer
    context.cache.compress()
    # a fifth of the 60 would be 12
    assert {n for heads in context.cache.lengths() for n in heads} == {len(held[0][0]) + 32}


def test_the_presets_of_the_papers():
    elastic, prefixkv = pykvedge.plan("elastic"), pykvedge.plan("prefixkv")
    assert (elastic.reducer, elastic.decode, elastic.allocator) == ("bucket", "fixed-point", "uniform")
    assert (prefixkv.reducer, prefixkv.decode, prefixkv.allocator) == ("evict", "ratio", "prefix")
    for plan in (elastic, prefixkv):
        assert plan.params["scorer.share"] == "layer" and plan.protected(100, 20) == (1, 1)
    assert dict(pykvedge.plan("elastic", scorer="window").params) == {}
    assert pykvedge.plan("elastic", **{"scorer.share": "head"}).params["scorer.share"] == "head"
