"""First inputs of the server's wire formats, and of the search for calls of tools."""

from __future__ import annotations

import base64
import json
import struct
import zlib

_FUNCTION = {
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}


def _pixel() -> str:
    """A PNG of one pixel as a data: URL."""
    parts = (
        (b"IHDR", struct.pack(">2I5B", 1, 1, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"\0\x80\x80\x80")),
        (b"IEND", b""),
    )
    chunks = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts)
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()


_IMAGE = {"type": "image_url", "image_url": {"url": _pixel()}}
_REQUESTS = {
    "plain": {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": True, "max_tokens": 8},
    "image": {
        "messages": [
            {"role": "system", "content": "Brief."},
            {"role": "user", "content": [{"type": "text", "text": "What?"}, _IMAGE]},
        ]
    },
    "sampling": {
        "messages": [{"role": "user", "content": "x"}],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": -1,
        "stop": ["a", "b"],
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
        "logit_bias": {"12": -100, "the": 1},
        "frequency_penalty": 1,
        "repeat_penalty": 1.1,
        "response_format": {"type": "json_object"},
    },
    "tools": {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "look", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "seen"},
        ],
        "tools": [{"type": "function", "function": _FUNCTION}],
        "tool_choice": {"function": {"name": "look"}},
    },
    "kvedge": {
        "messages": [{"role": "user", "content": "x"}],
        "kvedge": {"method": "snapkv", "budget": 0.2, "settings": {"scorer.window": 16, "recent": 8}, "patches": True},
    },
    "compression": {
        "method": "lookm",
        "budget": 64,
        "image_tokens": 0.5,
        "pruner": "residual",
        "settings": {"sinks": 4},
    },
    "anthropic": {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "Brief."}],
        "tools": [{"name": "look"}],
        "tool_choice": {"type": "any"},
        "stop_sequences": ["x"],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What?"},
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": _pixel().partition(",")[2]},
                    },
                ],
            },
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {"at": "x"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "seen"}]},
        ],
    },
    "responses": {
        "input": [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": _pixel()}],
            },
            {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "seen"},
        ],
        "instructions": "Brief.",
        "max_output_tokens": 9,
        "tools": [{"type": "function", **_FUNCTION}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    },
}
_SAID = {
    "object": '{"name": "look", "arguments": {"at": "x"}}',
    "list": '[{"name": "look", "parameters": {}}, {"name": "add", "arguments": "{\\"a\\": 1}"}]',
    "marked": 'I will.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}</tool_call>, <tool_call>{"name": "look"}',
    "fenced": 'So:\n```json\n{"name": "look", "arguments": {}}\n```\nDone.',
}
WIRE = {f"wire/{name}": json.dumps(request).encode() for name, request in _REQUESTS.items()} | {
    f"tools/{name}": text.encode() for name, text in _SAID.items()
}
