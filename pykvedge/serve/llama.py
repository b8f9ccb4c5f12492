"""Routes of llama-server that describe the server: /props, /slots, /tokenize, /detokenize, /apply-template, and the
fields that /v1/models has beside a name.
"""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from pykvedge.errors import RequestError
from pykvedge.models.model import Model
from pykvedge.models.prompt import FALLBACK
from pykvedge.runtime.sampling import Sampling
from pykvedge.serve.guarding import OWNER
from pykvedge.serve.service import Service, parsed_requests
from pykvedge.serve.wire import ChatRequest, Wire

_MAX_TEXT = 1 << 19  # most characters or tokens to convert at once
_OFF = {"mirostat": 0, "dynatemp_range": 0.0, "dry_multiplier": 0.0, "xtc_probability": 0.0, "adaptive_target": -1.0,
        "adaptive_decay": 0.0}  # samplers of llama-server that are not here
_ANY_SEED = 2**32 - 1  # llama.cpp's value for a new random seed per answer


async def props(service: Service, http: HttpRequest) -> Response:
    """GET /props: the model, its chat template, and the defaults of requests."""
    scheduler, defaults = service.scheduler, service.defaults
    model, n_ctx = scheduler.loan.model, scheduler.limits.n_ctx
    preparer = scheduler.preparer
    sampling = replace(defaults.sampling, max_tokens=defaults.max_tokens or defaults.room)
    params = sampling_settings(sampling, defaults.room)
    caps = await asyncio.to_thread(preparer.template_can)
    return JSONResponse({
        "default_generation_settings": {"params": params, "n_ctx": n_ctx},
        "total_slots": scheduler.limits.slots, "model_alias": service.name, "model_path": model.path.name,
        "modalities": {"vision": preparer.vision is not None, "audio": False, "video": False},
        "media_marker": preparer.composer.marker,
        "endpoint_slots": True, "endpoint_props": False, "endpoint_metrics": True,
        "chat_template": model.chat_template() or FALLBACK, "chat_template_caps": caps,
        "bos_token": model.special_text("bos"), "eos_token": model.special_text("eos"),
        "build_info": service.fingerprint, "is_sleeping": False,
        "kvedge": {"plan": json.loads(defaults.plan.to_json()), "tuned": defaults.tuned or None},
    })  # fmt: skip


def sampling_settings(sampling: Sampling, room: int) -> dict[str, Any]:
    """Returns a sampling under llama-server's names. room: tokens of a conversation; this max_tokens means no limit."""
    limit = -1 if sampling.max_tokens >= room else sampling.max_tokens
    same = ("top_k", "top_p", "min_p", "typical_p", "repeat_last_n", "repeat_penalty", "presence_penalty",
            "frequency_penalty")  # fmt: skip
    return {
        "seed": _ANY_SEED if sampling.seed is None else sampling.seed,
        "temperature": sampling.temp,
        **{name: getattr(sampling, name) for name in same},
        **_OFF,
        "stop": list(sampling.stop),
        "max_tokens": limit, "n_predict": limit, "n_keep": 0, "n_probs": sampling.logprobs or 0,
        "logit_bias": [{"token": token, "bias": bias if math.isfinite(bias) else None}
                       for token, bias in sampling.logit_bias.items()],
        "grammar": str(sampling.grammar or ""),
        "samplers": ["penalties", "top_k", "typ_p", "top_p", "min_p", "temperature"],
    }  # fmt: skip


def about_model(service: Service) -> dict[str, Any]:
    """Returns the fields of a model in llama-server's /v1/models, and fields that other programs expect there."""
    model, n_ctx = service.scheduler.loan.model, service.scheduler.limits.n_ctx
    sees = service.scheduler.preparer.vision is not None
    llama, header = model.llama, model.header
    return {
        "aliases": [service.name], "tags": [], "max_model_len": n_ctx,
        "architecture": {"input_modalities": ["text", "image"] if sees else ["text"], "output_modalities": ["text"]},
        "meta": {
            "vocab_type": llama.llama_vocab_type(model.vocab), "n_vocab": model.n_vocab, "n_ctx": n_ctx,
            "n_ctx_train": model.n_ctx_train, "n_embd": model.n_embd_input, "architecture": header.architecture,
            "n_params": llama.llama_model_n_params(model.handle), "size": llama.llama_model_size(model.handle),
        },
    }  # fmt: skip


def capabilities(service: Service) -> dict[str, Any]:
    """Returns the model's capabilities in the form of llama-server's /v1/models."""
    sees = service.scheduler.preparer.vision is not None
    can = ["completion", "multimodal"] if sees else ["completion"]
    return {"name": service.name, "model": service.name, "type": "model", "capabilities": can}


async def slots(service: Service, http: HttpRequest) -> Response:
    """GET /slots: which slots are busy. Figures only for jobs of the same key; never any text."""
    limits, owner = service.scheduler.limits, http.scope.get(OWNER, "")
    out: list[dict[str, Any]] = [
        {"id": i, "n_ctx": limits.n_ctx, "speculative": False, "is_processing": False} for i in range(limits.slots)
    ]
    for job, _, slot in service.scheduler.working():
        if slot is None:
            continue
        out[slot.sequence.number]["is_processing"] = True
        if job.request.owner != owner:
            continue
        tokens = job.report.tokens
        left = job.request.sampling.max_tokens - tokens.generated
        out[slot.sequence.number] |= {
            "id_task": job.id,
            "n_prompt_tokens": tokens.prompt + tokens.reused,
            "n_prompt_tokens_cache": tokens.reused,
            "next_token": [{"has_next_token": True, "n_remain": left, "n_decoded": tokens.generated}],
        }
    return JSONResponse(out)


class TokenizeRequest(Wire):
    """The body of POST /tokenize."""

    content: str | list[str | int]
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Wire):
    """The body of POST /detokenize."""

    tokens: Annotated[list[int], Field(max_length=_MAX_TEXT)]


async def tokenize(service: Service, http: HttpRequest, given: TokenizeRequest) -> Response:
    return JSONResponse({"tokens": await asyncio.to_thread(_tokens, service.scheduler.loan.model, given)})


def _tokens(model: Model, given: TokenizeRequest) -> list[Any]:
    parts = [given.content] if isinstance(given.content, str) else given.content
    if sum(len(part) if isinstance(part, str) else 1 for part in parts) > _MAX_TEXT:
        raise RequestError(400, f"content may have at most {_MAX_TEXT} characters and tokens", "too_large", "content")
    out = list[int]()
    for i, part in enumerate(parts):
        is_text = isinstance(part, str)
        out += model.tokenize(part, given.parse_special, given.add_special and i == 0) if is_text else [part]
    model.check(out)
    if not given.with_pieces:
        return out
    return [{"id": token, "piece": _piece(model.piece(token) or model.text([token]).encode())} for token in out]


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:  # a part of a character
        return list(data)


async def detokenize(service: Service, http: HttpRequest, given: DetokenizeRequest) -> Response:
    return JSONResponse({"content": await asyncio.to_thread(service.scheduler.loan.model.text, given.tokens)})


async def apply_template(service: Service, http: HttpRequest, given: ChatRequest) -> Response:
    """POST /apply-template: the prompt of a conversation, which a client can change and send to /completion."""
    [request] = await parsed_requests(service, http, given)
    if given.add_generation_prompt is False and given.messages[-1].role != "assistant":
        request = replace(request, values={**request.values, "add_generation_prompt": False})
    return JSONResponse({"prompt": await asyncio.to_thread(service.scheduler.preparer.written, request)})
