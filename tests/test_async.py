"""Session.aask does not block the event loop, and a cancelled task leaves a usable session."""

import asyncio
import threading
import time

import pytest

import pykvedge

LONG = pykvedge.Sampling(max_tokens=40)


async def text_of(session, *question):
    return "".join([piece async for piece in session.aask(*question)])


async def cancelled(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.fixture
def files(tiny, native):
    return tiny("llama")


def test_the_answer_is_that_of_ask_and_the_loop_goes_on(files):
    with files.session() as session:
        expected = session.ask("Hello there", sampling=LONG).read()

    async def both():
        turns = 0
        with files.session() as session:
            task = asyncio.ensure_future(text_of(session, "Hello there", (), LONG))
            while not task.done():
                await asyncio.sleep(0)
                turns += 1
            assert session.last_report.text == task.result()
            return task.result(), turns

    text, turns = asyncio.run(both())
    assert text == expected and turns > 40


def test_a_task_that_is_cancelled_in_an_answer_ends_it(files):
    async def both():
        with files.session() as session:
            said = []

            async def ask():
                async for piece in session.aask("Hello there", (), LONG):
                    said.append(piece)

            task = asyncio.ensure_future(ask())
            while not said:
                await asyncio.sleep(0)
            await cancelled(task)
            assert session.last_report.finish == "cancelled" and session.messages[-1].text.startswith("".join(said))
            async for _ in session.aask("And now?", (), LONG):
                break  # leaving the loop ends the answer too
            assert session.ask("And then?", sampling=LONG).read()
            assert [m.role for m in session.messages] == ["user", "assistant"] * 3

    asyncio.run(both())


def test_a_task_that_is_cancelled_while_the_prompt_is_read_takes_the_message_back(files):
    reading = threading.Event()

    def progress(what, done):
        if what == "preparing the context" and not reading.is_set():
            reading.set()
            while not session.stop.is_set():  # a step that takes long
                time.sleep(0.001)

    async def both():
        task = asyncio.ensure_future(text_of(session, "Hello there", (), LONG))
        await asyncio.to_thread(reading.wait)
        await cancelled(task)
        assert not session.messages and session.answer is None
        assert await text_of(session, "Hello there", (), LONG)

    with files.session(progress=progress) as session:
        asyncio.run(both())


def test_a_second_task_is_refused_while_the_first_has_an_answer(files):
    """Between two pieces no thread is in the session, but the answer is not finished."""

    async def both():
        with files.session() as session:
            first = session.aask("Hello there", (), LONG)
            said = await anext(first)
            with pytest.raises(pykvedge.StateError, match="another task"):
                await asyncio.ensure_future(text_of(session, "And now?", (), LONG))
            said += "".join([piece async for piece in first])
            assert session.last_report.text == said and session.last_report.finish in ("length", "end")
            assert await asyncio.ensure_future(text_of(session, "And now?", (), LONG))

            async def left():
                async for _ in session.aask("And then?", (), LONG):
                    return  # the event loop closes the unfinished generator

            await asyncio.ensure_future(left())
            assert await asyncio.ensure_future(text_of(session, "And at last?", (), LONG))
            assert [m.role for m in session.messages] == ["user", "assistant"] * 4

    asyncio.run(both())
