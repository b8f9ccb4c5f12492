"""Answers bare prompts, without a chat template: POST /completion in llama-server's form, and POST /v1/completions in
the form of OpenAI's older interface.

Special tokens that are written in a bare prompt are read as special tokens.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from pykvedge.errors import RequestError
from pykvedge.runtime.logprobs import Alternative, Token
from pykvedge.runtime.report import Report
from pykvedge.runtime.sampling import MAX_LOGPROBS
from pykvedge.serve import completions, errors
from pykvedge.serve.completions import FINISH, Events, EventStream, Progress
from pykvedge.serve.job import Done, Text
from pykvedge.serve.llama import sampling_settings
from pykvedge.serve.service import Service
from pykvedge.serve.waiting import Waiting
from pykvedge.serve.wire import MAX_PARTS, Limit, Prompted, Sampled, Wire

MAX_PROMPTS = 64  # per request

_Parts = Annotated[list[str | int], Field(min_length=1)]


class PromptObject(Wire):
    """A prompt with pictures: text with one media marker of /props per picture, and the files as base64."""

    prompt_string: str | _Parts
    multimodal_data: Annotated[list[str], Field(max_length=MAX_PARTS)] | None = None


_Prompt = str | PromptObject | Annotated[list[str | int | PromptObject | _Parts], Field(min_length=1)]


class _PromptRequest(Sampled):
    prompt: _Prompt

    def prompts(self) -> list[str | PromptObject | list[str | int]]:
        """Returns the prompts. A list that contains a number is one prompt. Raises RequestError."""
        given = self.prompt
        if not isinstance(given, list):
            return [given]
        if any(isinstance(part, int) for part in given):
            if not all(isinstance(part, (int, str)) for part in given):
                why = "a list with token numbers may have only token numbers and texts"
                raise errors.wrong("prompt", why)
            return [given]  # type: ignore[list-item]
        if len(given) * (self.n or 1) > MAX_PROMPTS:
            raise errors.wrong("prompt", f"a request may ask for at most {MAX_PROMPTS} answers")
        return given  # type: ignore[return-value]

    def cut(self, **changes: Any) -> list[Prompted]:
        """Returns one request per prompt. Raises RequestError."""
        same = {name: getattr(self, name) for name in Sampled.model_fields if name != "logit_bias"}
        out = []
        for one in self.prompts():
            pictures = one.multimodal_data or [] if isinstance(one, PromptObject) else []
            text = one.prompt_string if isinstance(one, PromptObject) else one
            urls = [f"data:image/png;base64,{data}" for data in pictures]
            parts = [text] if isinstance(text, str) else text
            out.append(Prompted(**{**same, **changes}, prompt=parts, pictures=urls))
        return out


# ------------------------------------------------------------------------------------------------ as llama-server


class LlamaRequest(_PromptRequest):
    """The body of POST /completion and POST /completions."""

    n_predict: Limit | None = None
    n_cmpl: Annotated[int, Field(ge=1, le=8)] | None = None
    n_probs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    post_sampling_probs: bool = False
    cache_prompt: bool = True
    ignore_eos: bool = False
    return_tokens: bool = False
    response_fields: list[str] | None = None
    logit_bias: dict[str, float] | list[tuple[str | int, float | bool]] | None = None  # type: ignore[assignment]

    def biases(self, ends: list[int]) -> dict[str, float] | None:
        """Returns the bias of each token, by text; false forbids a token. ends: tokens that end an answer."""
        given = self.logit_bias if isinstance(self.logit_bias, dict) else dict(self.logit_bias or [])
        out = {str(token): -math.inf if bias is False else float(bias) for token, bias in given.items()}
        out |= dict.fromkeys(map(str, ends), -math.inf) if self.ignore_eos else {}
        return out or None


async def llama(service: Service, http: HttpRequest, given: LlamaRequest) -> Response:
    if given.post_sampling_probs:
        raise RequestError(
            400, "post_sampling_probs is not supported: probabilities are always those before sampling", "unsupported"
        )
    limit = given.max_tokens if given.n_predict is None else given.n_predict
    ends = service.scheduler.loan.model.ends if given.ignore_eos else []
    prompts = given.cut(n=given.n_cmpl or given.n, max_tokens=limit, logit_bias=given.biases(ends),
                        likeliest=given.n_probs or None, keep=given.cache_prompt)  # fmt: skip
    waiting = await completions.asked(service, http, *prompts, joined=not given.stream)
    shown = _Llama(service, given, prompts, waiting)
    if given.stream:
        return EventStream(shown.events(await completions.begun(waiting, given.return_progress)))
    done = await completions.complete(waiting)
    answers = [shown.whole(i, one.report) for i, one in enumerate(done)]
    return JSONResponse(answers[0] if len(answers) == 1 else answers)


class _Llama:
    """Writes answers in llama-server's form."""

    def __init__(self, service: Service, given: LlamaRequest, prompts: list[Prompted], waiting: Waiting) -> None:
        self._service, self._given, self._prompts, self._waiting = service, given, prompts, waiting

    async def events(self, events: Events) -> AsyncIterator[str]:
        jobs, timed = self._waiting.jobs, self._given.timings_per_token
        read = [Progress(job, timed) for job in jobs] if self._given.return_progress else []
        with self._waiting:
            try:
                async for number, event in events:
                    for one in read[number].told(event) if read else ():
                        yield completions.data_line({**self._part(number, Text("")), **one})
                    if isinstance(event, Text):
                        yield completions.data_line(self._part(number, event))
                    elif isinstance(event, Done):
                        yield completions.data_line(self.whole(number, event.report))
            except Exception as error:
                yield completions.data_line(errors.body(errors.of(error)))

    def _part(self, number: int, event: Text) -> dict[str, Any]:
        report = self._waiting.jobs[number].report
        n_read = report.tokens.prompt + report.tokens.reused
        out: dict[str, Any] = {
            "index": number, "content": event.text, "tokens": list(event.ids), "stop": False, "id_slot": -1,
            "tokens_predicted": report.tokens.generated, "tokens_evaluated": n_read,
        }  # fmt: skip
        if event.tokens:
            out["completion_probabilities"] = [_likely(token) for token in event.tokens]
        if self._given.timings_per_token:
            out["timings"] = completions.timings(report)
        return out

    def whole(self, number: int, report: Report) -> dict[str, Any]:
        """Returns the object of a complete answer. In a stream it has no text, because the text was sent before."""
        job, given, n_read = self._waiting.jobs[number], self._given, report.tokens.prompt + report.tokens.reused
        stops = {"end": "eos", "stop": "word"}
        chosen_by = sampling_settings(job.request.sampling, self._service.defaults.room)
        out: dict[str, Any] = {
            "index": number, "content": "" if given.stream else report.text,
            "tokens": list(job.ids) if given.return_tokens and not given.stream else [],
            "id_slot": -1, "stop": True, "model": self._service.name,
            "tokens_predicted": report.tokens.generated, "tokens_evaluated": n_read,
            "generation_settings": {**chosen_by, "stream": bool(given.stream)},
            "prompt": self._written(self._prompts[number * len(self._prompts) // len(self._waiting.jobs)]),
            "has_new_line": "\n" in report.text, "truncated": report.finish == "context",
            "stop_type": stops.get(report.finish, "limit"), "stopping_word": job.stop_text,
            "tokens_cached": n_read + report.tokens.generated, "timings": completions.timings(report),
        }  # fmt: skip
        if report.logprobs is not None and not given.stream:
            out["completion_probabilities"] = [_likely(token) for token in report.logprobs]
        return _chosen(out, given.response_fields) if given.response_fields else out

    def _written(self, given: Prompted) -> str:
        """Returns a prompt as text, with the BOS token that the tokenizer adds."""
        model = self._service.scheduler.loan.model
        begins = model.special_text("bos") if model.adds_bos and isinstance(given.prompt[0], str) else ""
        return begins + "".join(part if isinstance(part, str) else model.text([part]) for part in given.prompt)


def _likely(token: Token) -> dict[str, Any]:
    return {**_numbered(token), "top_logprobs": [_numbered(other) for other in token.top]}


def _numbered(token: Token | Alternative) -> dict[str, Any]:
    return {"id": token.id, **completions.plain(token)}


def _chosen(answer: dict[str, Any], fields: list[str]) -> dict[str, Any]:
    """Returns the selected fields of an answer that exist. a/b: field b of field a, under the name a/b."""
    out = {}
    for name in fields:
        inside: Any = answer
        for step in name.split("/"):
            inside = inside.get(step, out) if isinstance(inside, dict) else out
        if inside is not out:
            out[name] = inside
    return out


# ------------------------------------------------------------------------------------------------------ as OpenAI


class CompletionRequest(_PromptRequest):
    """The body of POST /v1/completions."""

    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


async def openai(service: Service, http: HttpRequest, given: CompletionRequest) -> Response:
    wanted = {"echo": given.echo, "suffix": given.suffix, "best_of": (given.best_of or 1) > (given.n or 1)}
    for name, is_wanted in wanted.items():
        if is_wanted:
            raise RequestError(400, f"{name} is not supported", "unsupported", name)
    waiting = await completions.asked(service, http, *given.cut(logit_bias=given.logit_bias, likeliest=given.logprobs))
    if given.stream:
        return EventStream(_chunks(service, given, waiting, await completions.begun(waiting)))
    done = await completions.complete(waiting)
    choices = [
        _choice(i, one.report.text, FINISH.get(one.report.finish, "stop"), one.report.logprobs)
        for i, one in enumerate(done)
    ]
    return JSONResponse({**_about(service), "choices": choices, **_cost(done, given)})


async def _chunks(service: Service, given: CompletionRequest, waiting: Waiting, events: Events) -> AsyncIterator[str]:
    head, done, told = _about(service), dict[int, Done](), Counter[int]()
    with_usage = given.stream_options is not None and given.stream_options.include_usage
    with waiting:
        try:
            async for number, event in events:
                if isinstance(event, Text):
                    part = _choice(number, event.text, None, event.tokens or None, told[number])
                    told[number] += sum(len(token.text) for token in event.tokens)
                    yield completions.data_line({**head, "choices": [part]})
                elif isinstance(event, Done):
                    done[number] = event
                    end = _choice(number, "", FINISH.get(event.report.finish, "stop"), None)
                    times = completions.timings(event.report)
                    yield completions.data_line({**head, "choices": [end], "timings": times})
            if with_usage:
                yield completions.data_line({**head, "choices": [], **_cost([done[i] for i in sorted(done)], given)})
        except Exception as error:
            yield completions.data_line(errors.body(errors.of(error)))
        yield "data: [DONE]\n\n"


def _about(service: Service) -> dict[str, Any]:
    head = completions.about(service, "text_completion")
    return {**head, "id": head["id"].replace("chatcmpl", "cmpl")}


def _cost(done: list[Done], given: CompletionRequest) -> dict[str, Any]:
    counts = completions.usage([one.report for one in done], n=given.n or 1)
    return {"usage": counts, "timings": completions.timings(done[0].report), "kvedge": completions.figures(done)}


def _choice(
    number: int, text: str, finish: str | None, tokens: Sequence[Token] | None, begin: int = 0
) -> dict[str, Any]:
    return {"text": text, "index": number, "logprobs": _logprobs(tokens, begin), "finish_reason": finish}


def _logprobs(tokens: Sequence[Token] | None, begin: int) -> dict[str, Any] | None:
    """Returns the logprobs of tokens. begin: number of the answer's characters before them."""
    if tokens is None:
        return None
    offsets = list(itertools.accumulate((len(token.text) for token in tokens), initial=begin))
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [completions.finite(token.logprob) for token in tokens],
        "top_logprobs": [{other.text: completions.finite(other.logprob) for other in token.top} for token in tokens],
        "text_offset": offsets[:-1],
    }
