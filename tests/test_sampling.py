"""The choice of tokens: against the equations in NumPy, and against llama.cpp's samplers."""

import ctypes
import math

import numpy as np
import pytest

import pykvedge
from pykvedge import KvedgeWarning, Sampling, UsageError
from pykvedge.runtime.sampler import Sampler

QUESTION = "What is there to see, and what is it good for?"


def followed(session, sampling, n, pick):
    """Returns the answer's tokens, and the tokens that pick(logits, earlier tokens) chooses at the same places."""
    session.clear()
    answer = session.ask(QUESTION, sampling=sampling)
    context, model = session.engine.context, session.model
    sampler = Sampler(sampling, model)
    got, expected = [], []
    with sampler:
        while len(got) < n:
            logits = np.array(context.logits(), dtype=np.float64)
            expected.append(pick(logits, got))
            got.append(sampler.sample(context.handle))
            if model.is_end(got[-1]):
                break
            session.engine.extend(got[-1])
    answer.close()
    return got, expected


def penalised(logits, before, repeat=1.0, frequency=0.0, presence=0.0):
    logits = logits.copy()
    for token in set(before):
        logits[token] = logits[token] / repeat if logits[token] > 0 else logits[token] * repeat
        logits[token] -= before.count(token) * frequency + presence
    return logits


@pytest.mark.parametrize(
    "penalties", [{"repeat": 1.8}, {"frequency": 0.7}, {"presence": 2.5}, {"repeat": 1.3, "frequency": -0.5}]
)
def test_penalties_are_those_of_the_equations(session, penalties):
    names = {"repeat": "repeat_penalty", "frequency": "frequency_penalty", "presence": "presence_penalty"}
    few = dict.fromkeys((300, 301, 302, 303, 304), 20.0)  # these tokens then repeat

    def pick(logits, before, **what):
        logits[list(few)] += 20.0
        return int(penalised(logits, before[-3:], **what).argmax())

    settings = {names[name]: value for name, value in penalties.items()}
    got, expected = followed(
        session, Sampling(**settings, repeat_last_n=3, logit_bias=few), 30,
        lambda logits, before: pick(logits, before, **penalties),
    )  # fmt: skip
    assert got == expected
    plain, expected = followed(session, Sampling(logit_bias=few), 30, pick)
    assert plain == expected != got


def test_nothing_is_penalised_within_no_tokens(session):
    sampling = Sampling(repeat_penalty=2.0, presence_penalty=5.0, repeat_last_n=0)
    got, expected = followed(session, sampling, 12, lambda logits, _: int(logits.argmax()))
    assert got == expected


def test_a_bias_is_added_to_the_logit(session):
    first = session.ask(QUESTION, sampling=Sampling(max_tokens=1))
    logits = np.array(session.engine.context.logits())
    first.close()
    order = np.argsort(-logits)
    best, second = int(order[0]), int(order[1])
    gap = float(logits[best] - logits[second])
    for bias, chosen in [(gap * 0.9, best), (gap * 1.1 + 1e-3, second)]:
        got, _ = followed(session, Sampling(logit_bias={second: bias}), 1, lambda *_: 0)
        assert got == [chosen]
    got, _ = followed(session, Sampling(logit_bias={best: -math.inf}), 1, lambda *_: 0)
    assert got == [second]


def test_a_text_stands_for_all_of_its_tokens(session):
    tokens = session.model.tokenize("see what", special=False)
    assert len(tokens) > 1
    sampling = Sampling(logit_bias={"see what": 50.0}, frequency_penalty=20.0, max_tokens=2 * len(tokens))
    got, expected = followed(
        session, sampling, 2 * len(tokens),
        lambda logits, before: int(
            penalised(logits + 50.0 * np.isin(np.arange(len(logits)), tokens), before, frequency=20.0).argmax()
        ),
    )  # fmt: skip
    assert got == expected and set(tokens) <= set(got)


def allowed_by(session, sampling, n=400):
    """Returns the first tokens that n seeds draw."""
    from dataclasses import replace

    context = session.engine.context
    drawn = set()
    for seed in range(n):
        with Sampler(replace(sampling, seed=seed), session.model) as sampler:
            drawn.add(sampler.sample(context.handle))
    return drawn


def test_min_p_keeps_what_is_likely_enough(session):
    session.ask(QUESTION, sampling=Sampling(max_tokens=1)).read()
    logits = np.array(session.engine.context.logits(), dtype=np.float64)
    shares = np.exp(logits - logits.max())
    # the limit is in the middle of the widest gap among the likeliest, so that rounding does not matter
    ordered = np.sort(shares)[::-1][:12]
    gap = int(np.argmax(ordered[1:-1] / ordered[2:])) + 1
    limit = math.sqrt(ordered[gap] * ordered[gap + 1])
    drawn = allowed_by(session, Sampling(temp=1.0, top_k=0, top_p=1.0, min_p=limit), 200 * (gap + 1))
    assert drawn == set(np.flatnonzero(shares >= limit).tolist())


def chain(llama, links):
    made = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    for link in links:
        llama.llama_sampler_chain_add(made, link)
    return made


def test_the_order_is_that_of_llama_cpp(session):
    """A separate chain in the order of llama.cpp's programs draws the same tokens."""
    settings = {"temp": 1.7, "top_k": 60, "typical_p": 0.9, "top_p": 0.9, "min_p": 0.01, "repeat_penalty": 1.4}
    sampling = Sampling(**settings, frequency_penalty=0.2, presence_penalty=0.1, logit_bias={7: 3.0}, seed=5)
    llama, n_vocab = session.model.llama, session.model.n_vocab
    bias = (llama.llama_logit_bias * 1)((7, 3.0))
    stock = chain(llama, [
        llama.llama_sampler_init_logit_bias(n_vocab, 1, bias),
        llama.llama_sampler_init_penalties(n_vocab, 64, 1.4, 0.2, 0.1),
        llama.llama_sampler_init_top_k(60),
        llama.llama_sampler_init_typical(0.9, 1),
        llama.llama_sampler_init_top_p(0.9, 1),
        llama.llama_sampler_init_min_p(0.01, 1),
        llama.llama_sampler_init_temp(1.7),
        llama.llama_sampler_init_dist(5),
    ])  # fmt: skip
    handle = lambda: session.engine.context.handle  # noqa: E731
    got, expected = followed(
        session, sampling, 40, lambda *_: llama.llama_sampler_sample(stock, ctypes.c_void_p(handle()), -1)
    )
    llama.llama_sampler_free(stock)
    assert got == expected and len(set(got)) > 5


@pytest.mark.parametrize("settings", [{}, {"temp": 1.5, "top_k": 0, "top_p": 0.8, "seed": 3}])
def test_settings_that_are_off_change_nothing(session, settings):
    off = {"min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0, "frequency_penalty": 0.0, "logit_bias": {}}
    plain = session.ask(QUESTION, sampling=Sampling(**settings, max_tokens=25)).read()
    session.clear()
    assert session.ask(QUESTION, sampling=Sampling(**settings, **off, max_tokens=25)).read() == plain
    llama = session.model.llama
    links = [llama.llama_sampler_init_greedy()]
    if settings:
        links = [llama.llama_sampler_init_top_p(0.8, 1), llama.llama_sampler_init_temp(1.5),
                 llama.llama_sampler_init_dist(3)]  # fmt: skip
    stock = chain(llama, links)
    got, expected = followed(
        session, Sampling(**settings), 25,
        lambda *_: llama.llama_sampler_sample(stock, session.engine.context.handle, -1),
    )  # fmt: skip
    llama.llama_sampler_free(stock)
    assert got == expected


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"min_p": 1.5}, "min_p must lie between 0 and 1"),
        ({"min_p": math.nan}, "min_p"),
        ({"typical_p": 0}, "typical_p must be above 0"),
        ({"repeat_penalty": 0}, "repeat_penalty must be above 0"),
        ({"repeat_penalty": math.inf}, "repeat_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"presence_penalty": "much"}, "must be a number"),
        ({"repeat_last_n": -1}, "repeat_last_n"),
        ({"repeat_last_n": 2**40}, "repeat_last_n"),
        ({"repeat_last_n": 1.5}, "whole number"),
        ({"max_tokens": 2**40}, "max_tokens must lie between 1 and 2147483647"),
        ({"max_tokens": True}, "max_tokens must be a whole number, not True"),
        ({"temp": False}, "temp must be a number, not False"),
        ({"logit_bias": [1, 2]}, "must map tokens"),
        ({"logit_bias": {1: "x"}}, "must be a number"),
        ({"logit_bias": {1: math.nan}}, "between -1e6 and 1e6"),
        ({"logit_bias": {1: math.inf}}, "between -1e6 and 1e6"),
        ({"logit_bias": {1.5: 1.0}}, "must be a number or a text"),
        ({"logit_bias": {True: 1.0}}, "must be a number or a text"),
        ({"logit_bias": {"": 1.0}}, "must be a number or a text"),
    ],
)
def test_values_that_cannot_be_used(settings, why):
    with pytest.raises(UsageError, match=why) as error:
        Sampling(**settings)
    assert "\n" not in str(error.value)


def test_biases_that_do_not_fit_the_model_end_before_anything_is_read(session):
    n_vocab = session.model.n_vocab
    for token in (n_vocab, -1, 2**70):
        with pytest.raises(UsageError, match=f"from 0 to {n_vocab - 1}"):
            session.ask(QUESTION, sampling=Sampling(logit_bias={token: 1.0}))
    with pytest.raises(UsageError, match="forbids every token"):
        session.ask(QUESTION, sampling=Sampling(logit_bias=dict.fromkeys(range(n_vocab), -math.inf)))
    assert not session.messages and session.ask(QUESTION, sampling=Sampling(max_tokens=2)).read()


def test_a_sampling_can_be_compared_and_be_a_key():
    one, other = Sampling(logit_bias={3: 1.0}), Sampling(logit_bias={3: 2.0})
    assert one != other and one == Sampling(logit_bias={3: 1.0}) and len({one, other, Sampling()}) == 3
    assert pykvedge.Sampling is Sampling


def test_options_reach_the_sampler(kvedge, tiny):
    base = ["chat", *tiny("llama").arguments(), "--quiet", "--max-tokens", 20]
    plain = kvedge(*base, "Hello").out
    for options in (["--repeat-penalty", "2"], ["--frequency-penalty", "3"], ["--presence-penalty", "9"]):
        done = kvedge(*base, *options, "Hello")
        assert done.code == 0 and done.out != plain, done
        assert kvedge(*base, *options, "--repeat-last-n", 0, "Hello").out == plain
    drawn = [*base, "--temp", "2", "--top-k", 0, "--top-p", 1, "--seed", 4]
    free = kvedge(*drawn, "Hello").out
    assert kvedge(*drawn, "--min-p", "1", "Hello").out == plain != free
    assert kvedge(*drawn, "--typical-p", "0.2", "Hello").out != free
    with tiny("llama").session() as session:
        first = session.model.tokenize(plain.split()[0], special=False)
    forbidden = kvedge(*base, *(f"--logit-bias={token}=-inf" for token in first), "Hello")
    assert forbidden.code == 0 and forbidden.out.split()[0] != plain.split()[0]


def test_options_that_cannot_be_used(kvedge, tiny):
    base = ["chat", *tiny("llama").arguments(), "Hello"]
    kvedge(*base, "--min-p", "2").failed(2, "min_p", "between 0 and 1")
    kvedge(*base, "--repeat-penalty", "-1").failed(2, "repeat_penalty")
    for bad in ("42", "=1", "42=much", "x="):
        kvedge(*base, "--logit-bias", bad).failed(2, "ID=BIAS")
    kvedge(*base, "--logit-bias", "99999999=1").failed(2, "logit_bias names token 99999999")


def test_options_that_do_nothing_are_named(kvedge):
    base = ["chat", "--max-tokens", 1]
    done = kvedge(*base, "--top-p", 0.5, "--seed", 5, "Hi")
    assert "kvedge: warning: --top-p, --seed has no effect at --temp 0; set --temp above 0\n" in done.err
    assert "warning" not in kvedge(*base, "--top-p", 0.5, "--seed", 5, "--temp", 1, "Hi").err
    assert "warning" not in kvedge(*base, "Hi").err
    with pytest.warns(KvedgeWarning, match=r"512 threads are more than \d+ processors"):
        pykvedge.Settings(threads=512)


def test_an_answer_that_is_cut_says_so(kvedge):
    endless = ["chat", "--logit-bias", "2=-inf", "Hello"]
    assert "kvedge: the answer was cut because the context is full; raise --ctx\n" in kvedge(*endless, "--ctx", 40).err
    assert "kvedge: the answer was cut after 512 tokens; raise --max-tokens\n" in kvedge(*endless).err
    assert "was cut" not in kvedge(*endless, "--max-tokens", 5).err
    assert "was cut" not in kvedge("chat", "Hello").err
