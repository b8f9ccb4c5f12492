"""Threads of a server's turns: one processor is left to others where that pays."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from server import SCENES, asks, serving

from pykvedge.chat.serve.crew import Crew


def turns(crew, n, conversations, seconds):
    """Takes so many turns. Returns the threads of each."""
    out = []
    for _ in range(n):
        out.append(crew.threads(conversations))
        crew.took(seconds)
    return out


def test_a_processor_is_left_while_many_are_answered_quickly():
    crew = Crew(4, 4)
    assert set(turns(crew, 5, 8, 0.001)) == {4}  # nothing is known yet
    assert turns(crew, 40, 8, 0.001)[-1] == 3
    assert turns(crew, 20, 1, 0.001)[-1] == 4  # somebody alone has all of them
    assert crew.threads(2) == 3


def test_slow_turns_have_all_threads():
    crew = Crew(4, 4)
    assert set(turns(crew, 100, 8, 0.2)) == {4}
    turns(crew, 200, 8, 0.001)
    assert crew.threads(8) == 3
    assert turns(crew, 100, 8, 0.005)[-1] == 3  # not back and forth
    assert turns(crew, 100, 8, 0.02)[-1] == 4


@pytest.mark.parametrize(("threads", "processors", "fewer"), [(1, 1, 1), (2, 8, 2), (8, 2, 1), (8, 8, 7)])
def test_no_more_than_was_asked_for(threads, processors, fewer):
    crew = Crew(threads, processors)
    assert turns(crew, 1, 4, 0.001) == [threads]
    assert turns(crew, 100, 4, 0.001)[-1] == fewer


def test_answers_do_not_depend_on_the_threads(environment):
    with serving(environment, "--threads", "2", "--method", "lookm", "--budget", "0.3", "--parallel", "4") as server:
        questions = [asks(text, path) for path in SCENES[:2] for text in ("Describe the image.", "What is the code?")]
        alone = [server.text(said) for said in questions]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(server.text, questions * 12)) == alone * 12
        assert [server.text(said) for said in questions] == alone
