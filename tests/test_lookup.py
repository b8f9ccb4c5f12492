"""The search for earlier places of a text, against a search through the whole text."""

import random

from pykvedge.runtime.lookup import BREAK, Lookup

LENGTHS = (16, 8, 4, 2)


def last_place(tokens, length):
    """Returns the end of the last earlier place of the last `length` tokens; -1: none, or not all are text."""
    run = tokens[-length:]
    if len(run) < length or min(run) < 0:
        return -1
    ends = range(len(tokens) - 2, length - 2, -1)
    return next((end for end in ends if tokens[end - length + 1 : end + 1] == run), -1)


def going_on(tokens, place, most):
    """Returns what followed a place; it may run into the guessed tokens."""
    text, out = list(tokens), []
    while len(out) < most and text[place + 1 + len(out)] >= 0:
        out.append(text[place + 1 + len(out)])
        text.append(out[-1])
    return out


def test_guesses_follow_the_longest_run_that_was_there_before():
    for seed in range(60):
        rng = random.Random(seed)
        n_tokens, lookup, text = rng.choice([2, 4, 60]), Lookup(), []
        while len(text) < rng.randint(10, 400):
            part = [rng.randrange(n_tokens) for _ in range(rng.choice([1, 1, 1, 6, 30]))]
            if len(text) > 30 and rng.random() < 0.3:
                part = [t for t in text[-30:-10] if t >= 0]
            if rng.random() < 0.1:
                lookup.add([BREAK])
                text.append(-1)
            lookup.add(part)
            text += part
        for token in range(n_tokens if n_tokens < 10 else 20):
            said = [*text, token]
            guessed, alike = lookup.guess(token, 9)
            longest = max((n for n in LENGTHS if last_place(said, n) >= 0), default=0)
            assert alike >= longest, (token, longest)
            if not longest:
                assert (guessed, alike) == ([], 0)
                continue
            ends = [end for end in range(len(text)) if said[max(0, end + 1 - alike) : end + 1] == said[-alike:]]
            assert guessed in [going_on(said, end, 9) for end in ends]
            if alike == longest:
                assert guessed == going_on(said, last_place(said, longest), 9)


def test_a_text_that_repeats_itself_goes_on_so():
    lookup = Lookup()
    lookup.add([5, 6, 7, 5, 6])
    assert lookup.guess(7, 7) == ([5, 6, 7, 5, 6, 7, 5], 3)
    assert lookup.guess(9, 7) == ([], 0) and lookup.guess(7, 0)[0] == []


def test_no_guess_goes_across_an_image():
    lookup = Lookup()
    lookup.add([1, 2, 3])
    lookup.add([BREAK])
    lookup.add([4, 5, 1])
    assert lookup.guess(2, 5) == ([3], 2)
    lookup.add([BREAK])
    assert lookup.guess(4, 5) == ([], 0)


def test_a_long_text_is_found_again_after_the_tables_grew():
    rng = random.Random(1)
    text = [rng.randrange(30000) for _ in range(30000)]
    lookup = Lookup()
    lookup.add(text[:10000])
    for token in text[10000:11000]:
        lookup.add([token])
    lookup.add(text[11000:])
    for start in (17, 4095, 10500, 29000):
        lookup.add([BREAK])
        lookup.add(text[start : start + 20])
        assert lookup.guess(text[start + 20], 8) == (text[start + 21 : start + 29], 16)
