"""Answers POST /v1/chat/completions with one JSON object or a stream of chunks."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from pykvedge.models.dialect import Call, ParsedAnswer
from pykvedge.runtime.logprobs import Alternative, Token
from pykvedge.runtime.report import Report
from pykvedge.serve import errors
from pykvedge.serve.job import READING, Done, Event, Job, Step, Text
from pykvedge.serve.reading import LONG, Delta, Reading, reading
from pykvedge.serve.service import Service, parsed_requests
from pykvedge.serve.waiting import Waiting
from pykvedge.serve.wire import ChatRequest, Prompted
from pykvedge.system.guard import undoing

Events = AsyncIterator[tuple[int, Event]]
FINISH = {"end": "stop", "stop": "stop", "length": "length", "context": "length", "cancelled": "stop"}
_STEP_S = 0.1  # least seconds between two progress messages
_KNOWN_S = 0.9  # seconds: an error within this time has a matching HTTP status; later errors come inside the stream
_QUIET_S = 10.0  # seconds of silence before a comment is sent, because proxies and clients close silent streams


async def answer(service: Service, http: HttpRequest, given: ChatRequest) -> Response:
    """Answers a chat request. Raises RequestError and the errors of the scheduler."""
    if given.add_generation_prompt is False and given.messages[-1].role != "assistant":
        why = "false needs a last message of the role assistant; omit this field"
        raise errors.wrong("add_generation_prompt", why)
    waiting = await asked(service, http, given)
    if not given.stream:
        done = await complete(waiting)
        parsed = [await whole(given, waiting, i, one.report) for i, one in enumerate(done)]
        return JSONResponse(completion(service, given, done, parsed))
    at_once = given.kvedge is not None and given.kvedge.progress
    events = waiting.events() if at_once else await begun(waiting, given.return_progress)
    return EventStream(Chunks(service, given, waiting).written(events))


async def asked(
    service: Service, http: HttpRequest, *given: ChatRequest | Prompted, count_only: bool = False, joined: bool = True
) -> Waiting:
    """Submits requests whose answers belong together to the scheduler.

    count_only: counts the tokens of the prompt, without an answer. joined: as in Waiting.
    """
    service.check_model(given[0].model)
    requests = await parsed_requests(service, http, *given)
    waiting = Waiting(service.scheduler, http, joined)
    with undoing(waiting.close):
        for one, request in zip(given, requests, strict=True):
            seed = request.sampling.seed
            for i in range(one.n or 1):
                sampling = request.sampling if seed is None else replace(request.sampling, seed=(seed + i) % 2**32)
                waiting.submit(replace(request, sampling=sampling, count_only=count_only))
    return waiting


async def count(service: Service, http: HttpRequest, given: ChatRequest) -> int:
    """Returns the number of tokens of a prompt, with the tokens that would be read from its pictures."""
    waiting = await asked(service, http, given, count_only=True)
    return (await complete(waiting))[0].report.tokens.prompt


async def complete(waiting: Waiting) -> list[Done]:
    """Waits for all answers. Raises the error of a failed answer, and an error if the client leaves."""
    with waiting:
        done: dict[int, Done] = {}
        async for number, event in waiting.events():
            if isinstance(event, Done):
                done[number] = event
        return [done[i] for i in sorted(done)]


async def begun(waiting: Waiting, progress: bool = False) -> Events:
    """Waits until an answer begins, about a second at most: an earlier error has a matching HTTP status.

    progress: the reading of the prompt also counts as a beginning.
    """
    events, end = waiting.events(), time.monotonic() + _KNOWN_S
    with undoing(waiting.close):
        async for number, event in events:
            wanted = not isinstance(event, Step) or (progress and event.what == READING)
            if wanted or time.monotonic() > end:
                return _again((number, event), events)
    return events


async def parts(answer: Reading, events: Events) -> AsyncIterator[tuple[Done | None, list[Delta]]]:
    """Yields the deltas of one answer, and Done with the last deltas. Raises the error of a failed answer."""
    async for _, event in events:
        if isinstance(event, Text):
            yield None, await read(answer, event.text)
        elif isinstance(event, Done):
            yield event, await read(answer, "", last=True)


async def _again(first: tuple[int, Event], events: Events) -> Events:
    yield first
    async for item in events:
        yield item


class EventStream(Response):
    """Sends text as it comes, and comments during silence. The iterator of the text must notice a client that leaves:
    starlette's StreamingResponse would use two more tasks per answer for this.
    """

    media_type = "text/event-stream"

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines, self.status_code, self.background = lines, 200, None
        self._said = -math.inf
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        beating = asyncio.create_task(self._beat(send))
        try:
            async for text in self._lines:
                self._said = time.monotonic()
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        finally:
            beating.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _beat(self, send: Send) -> None:
        while True:
            if time.monotonic() - self._said >= _QUIET_S:
                self._said = time.monotonic()
                await send({"type": "http.response.body", "body": b": working\n\n", "more_body": True})
            await asyncio.sleep(self._said + _QUIET_S - time.monotonic())


def reading_of(given: ChatRequest, waiting: Waiting, number: int = 0) -> Reading:
    return reading(given, waiting.jobs[number].request.dialect)


async def read(answer: Reading, text: str, last: bool = False) -> list[Delta]:
    """Parses the next text of an answer. Raises RequestError."""
    take = answer.finish if last else answer.feed
    return await asyncio.to_thread(take, text) if answer.is_long or len(text) > LONG else take(text)


async def whole(given: ChatRequest, waiting: Waiting, number: int, report: Report) -> ParsedAnswer:
    """Parses a complete answer. Raises RequestError."""
    answer = reading_of(given, waiting, number)
    await read(answer, report.text, last=True)
    parsed = answer.parsed
    return replace(parsed, text=parsed.text.strip()) if parsed.calls else parsed


def completion(service: Service, given: ChatRequest, done: list[Done], parsed: list[ParsedAnswer]) -> dict[str, Any]:
    """Returns the chat completion object of complete answers."""
    choices = []
    for i, (report, one) in enumerate(zip((one.report for one in done), parsed, strict=True)):
        content = one.text or (None if one.calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if one.reasoning:
            message["reasoning_content"] = one.reasoning
        if one.calls:
            message["tool_calls"] = [_call(call) for call in one.calls]
        choices.append({
            "index": i,
            "message": _named_as_asked(given, message),
            "finish_reason": _finish_as_asked(given, _finish(report, bool(one.calls))),
            "logprobs": _logprobs(report.logprobs),
        })  # fmt: skip
    return {
        **about(service, "chat.completion"),
        "choices": choices,
        "usage": usage([one.report for one in done], reasoned(service, parsed)),
        "timings": timings(done[0].report),
        "kvedge": figures(done),
    }


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def about(service: Service, what: str) -> dict[str, Any]:
    """Returns the first fields of an answer's object."""
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": what,
        "created": int(time.time()),
        "model": service.name,
        "system_fingerprint": service.fingerprint,
    }


def _finish(report: Report, called: bool) -> str:
    return "tool_calls" if called and report.finish in ("end", "stop") else FINISH.get(report.finish, "stop")


def _named_as_asked(given: ChatRequest, message: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool call under the old name `function_call` for a request that gave `functions`."""
    if given.functions and (calls := message.pop("tool_calls", None)):
        call = calls[0]["function"]
        return {**message, "function_call": {name: call[name] for name in ("name", "arguments") if name in call}}
    return message


def _finish_as_asked(given: ChatRequest, finish: str | None) -> str | None:
    return "function_call" if given.functions and finish == "tool_calls" else finish


def reasoned(service: Service, parsed: Iterable[ParsedAnswer]) -> int:
    """Returns the number of tokens of the reasoning in answers."""
    model = service.scheduler.loan.model
    return sum(len(model.tokenize(one.reasoning, special=False)) for one in parsed if one.reasoning)


def usage(reports: list[Report], reasoning: int = 0, n: int = 0) -> dict[str, Any]:
    """Returns the token counts: each prompt once, and all answers. reasoning: tokens of reasoning among the answers.

    n: number of consecutive answers per prompt; 0: all answers have the same prompt.
    """
    prompts = [report.tokens for report in reports[:: n or len(reports)]]
    reused = sum(one.reused for one in prompts)
    prompt, generated = reused + sum(one.prompt for one in prompts), sum(one.tokens.generated for one in reports)
    drafts = [report.drafts for report in reports if report.drafts is not None]
    right, all_ = sum(one.accepted for one in drafts), sum(one.drafted for one in drafts)
    drafted = {"accepted_prediction_tokens": right, "rejected_prediction_tokens": all_ - right} if drafts else {}
    n_demoted = reports[0].demoted_images
    demoted = {} if n_demoted is None else {"demoted_images": n_demoted}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": reused, **demoted},
        "completion_tokens_details": {"reasoning_tokens": min(reasoning, generated), **drafted},
    }


def timings(report: Report) -> dict[str, Any]:
    """Returns the timings of an answer in llama-server's form: milliseconds and tokens per second."""
    spent, tokens = report.time, report.tokens
    read_s = spent.prefill_s + spent.replay_s + spent.compress_s
    return {
        "cache_n": tokens.reused,
        **_rate("prompt", tokens.prompt, tokens.prompt, read_s),
        **_rate("predicted", tokens.generated, spent.decode_steps, spent.decode_s),
    }


def _rate(name: str, n: int, steps: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": n,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / steps if steps else 0.0,
        f"{name}_per_second": steps / seconds if steps and seconds > 0 else 0.0,
    }


class Progress:
    """Reports how much of one answer's prompt was read, in llama-server's form, beginning at the reused tokens."""

    def __init__(self, job: Job, timed: bool) -> None:
        """timed: also reports timings."""
        self._job, self._timed, self._told = job, timed, -1

    def told(self, event: Event) -> list[dict[str, Any]]:
        """Returns the fields of the next chunks, for the progress that an event adds."""
        tokens = self._job.report.tokens
        total, now = tokens.prompt + tokens.reused, -1
        if isinstance(event, Step) and event.what == READING:
            now = tokens.reused + round(event.share * tokens.prompt)
        elif isinstance(event, (Text, Done)):
            now = total
        out = list[dict[str, Any]]()
        if self._told < 0 <= now:
            self._told = tokens.reused
            out.append(self._chunk(total, 0.0))
        if now > self._told:
            self._told = now
            out.append(self._chunk(total, time.perf_counter() - self._job.asked_at))
        return out

    def _chunk(self, total: int, seconds: float) -> dict[str, Any]:
        cached = self._job.report.tokens.reused
        new = self._told - cached
        read = {"total": total, "cache": cached, "processed": self._told, "time_ms": round(1000 * seconds)}
        times = {"cache_n": cached, **_rate("prompt", new, new, seconds), **_rate("predicted", 0, 0, 0.0)}
        return {"prompt_progress": read, **({"timings": times} if self._timed else {})}


def figures(done: list[Done]) -> list[dict[str, Any]]:
    """Returns each answer's costs, as in `kvedge chat --json` without fields given elsewhere, and its kept patches."""
    told = ("method", "budget", "stop", "tokens", "kv", "time", "drafts")
    out = [{name: part for name, part in one.report.as_json().items() if name in told} for one in done]
    for one, of in zip(done, out, strict=True):
        of.update({"patches": one.patches} if one.patches is not None else {})
        of.update({"notes": one.report.notes} if one.report.notes else {})
    return out


def _logprobs(tokens: list[Token] | tuple[Token, ...] | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    told = [{**plain(token), "top_logprobs": [plain(t) for t in token.top]} for token in tokens]
    return {"content": told, "refusal": None}


def plain(token: Token | Alternative) -> dict[str, Any]:
    return {"token": token.text, "logprob": finite(token.logprob), "bytes": list(token.data)}


def finite(logprob: float) -> float:
    """Returns a logarithm, at least -9999, because JSON has no infinity."""
    return max(logprob, -9999.0)


def data_line(told: dict[str, Any]) -> str:
    return f"data: {json.dumps(told)}\n\n"


class Chunks:
    """Writes answers as the chunks of a stream."""

    def __init__(self, service: Service, given: ChatRequest, waiting: Waiting) -> None:
        self._service, self._given, self._waiting = service, given, waiting
        self._head = about(service, "chat.completion.chunk")
        self._usage = given.stream_options is not None and given.stream_options.include_usage
        self._answers = [reading_of(given, waiting, i) for i in range(len(waiting.jobs))]
        self._tokens: dict[int, tuple[Token, ...]] = {}  # tokens whose text is not yet sent
        self._done: dict[int, Done] = {}
        self._last: list[str] = []
        self._progress = given.kvedge is not None and given.kvedge.progress
        timed = given.timings_per_token
        self._read = [Progress(job, timed) for job in waiting.jobs] if given.return_progress else []

    async def written(self, events: Events) -> AsyncIterator[str]:
        """Yields the stream. If the client leaves, ends the stream and its jobs."""
        with self._waiting:
            begin = "".join(
                self._chunk(i, {"role": "assistant", "content": None}) for i in range(len(self._waiting.jobs))
            )
            end = "data: [DONE]\n\n"
            try:
                async for line in self._lines(events):
                    yield begin + line
                    begin = ""
            except Exception as error:
                end = data_line(errors.body(errors.of(error))) + end
            else:
                if self._usage:
                    done = [self._done[i] for i in sorted(self._done)]
                    reasoning = reasoned(self._service, [one.parsed for one in self._answers])
                    last = {**self._head, "choices": [], "usage": usage([one.report for one in done], reasoning)}
                    last |= {"timings": timings(done[0].report), "kvedge": figures(done)}
                    end = data_line(last) + end
            yield f"{begin}{''.join(self._last)}{end}"

    async def _lines(self, events: Events) -> AsyncIterator[str]:
        """Yields the lines before the end of the last answer. Leaves the last lines in `_last`, for the end."""
        sent_s = time.monotonic()
        async for number, event in events:
            if isinstance(event, Step) and self._progress and event.share < 1 and time.monotonic() - sent_s < _STEP_S:
                continue
            lines = await self._of(number, event)
            if len(self._done) == len(self._waiting.jobs):
                self._last = lines
            elif lines:
                sent_s = time.monotonic()
                yield "".join(lines)

    async def _of(self, number: int, event: Event) -> list[str]:
        if isinstance(event, Step) and self._progress:
            told = {"progress": {"what": event.what, "share": round(event.share, 4)}}
            return [data_line({**self._head, "choices": [], "kvedge": told})]
        answer = self._answers[number]
        told_of = self._read[number].told(event) if self._read else []
        read_on = [self._chunk(number, {}, more=one) for one in told_of]
        if isinstance(event, Text):
            self._tokens[number] = self._tokens.get(number, ()) + event.tokens
            return read_on + self._told(number, await read(answer, event.text))
        if not isinstance(event, Done):
            return read_on
        self._done[number] = event
        lines = read_on + self._told(number, await read(answer, "", last=True))
        if self._tokens.get(number):
            lines += self._told(number, [Delta()])
        finish = _finish(event.report, bool(answer.parsed.calls))
        return [*lines, self._chunk(number, {}, finish=finish, more={"timings": timings(event.report)})]

    def _told(self, number: int, deltas: list[Delta]) -> list[str]:
        """Writes deltas as chunks. The first chunk has the logprobs of all tokens since the previous call."""
        job = self._waiting.jobs[number]
        more = {"timings": timings(job.report)} if self._given.timings_per_token else {}
        return [
            self._chunk(number, _delta(delta), logprobs=_logprobs(self._tokens.pop(number, None) or None), more=more)
            for delta in deltas
        ]

    def _chunk(
        self,
        number: int,
        delta: dict[str, Any],
        finish: str | None = None,
        logprobs: dict[str, Any] | None = None,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        choice = {
            "index": number,
            "delta": _named_as_asked(self._given, delta),
            "finish_reason": _finish_as_asked(self._given, finish),
            "logprobs": logprobs,
        }
        counted = {"usage": None} if self._usage else {}
        return data_line({**self._head, "choices": [choice], **counted, **more})


def _delta(delta: Delta) -> dict[str, Any]:
    if delta.reasoning:
        return {"reasoning_content": delta.reasoning}
    if delta.call < 0:
        return {"content": delta.text}
    function = {**({"name": delta.name} if delta.name else {}), "arguments": delta.arguments}
    head = {"id": delta.id, "type": "function"} if delta.name else {}
    return {"tool_calls": [{"index": delta.call, **head, "function": function}]}
