"""Runs the client programs of the OpenAI and Anthropic APIs against `kvedge serve` with the packaged model.

    pip install openai anthropic langchain-openai litellm instructor pydantic-ai-slim[openai] llm
    python3 experiments/check_clients.py http://127.0.0.1:8137 [--json]

Needs a running server (`kvedge serve`), and any Python that has the clients; missing clients are skipped. The packaged
model only describes scenes, so the checks look at the form of answers, not at their words. Exit code: 1 if a check
fails.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import importlib.metadata
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from serve_load import SCENES, picture

URL = picture(SCENES[0])
PICTURE = URL["image_url"]["url"].partition(",")[2]
ASKED = [{"role": "user", "content": [URL, {"type": "text", "text": "What is the code?"}]}]
SCHEMA = {"type": "object", "properties": {"shapes": {"type": "integer", "minimum": 0, "maximum": 9}},
          "required": ["shapes"], "additionalProperties": False}  # fmt: skip
WEATHER = {"name": "weather", "description": "Tells the weather.",
           "parameters": {"type": "object", "properties": {"town": {"type": "string", "maxLength": 8}},
                          "required": ["town"], "additionalProperties": False}}  # fmt: skip
Check = Callable[[], Any]


def require(what: Any, found: Any = None) -> None:
    if not what:
        raise AssertionError(f"not so: {found!r:.200}" if found is not None else "not so")


def of_openai(url: str) -> Iterator[tuple[str, Check]]:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    given: dict[str, Any] = {"model": client.models.list().data[0].id, "max_tokens": 24, "temperature": 0}
    yield from of_chats(client.chat.completions, given)
    yield from of_more_chats(client.chat.completions, given)
    yield from of_other_routes(client, given)


def of_chats(chat: Any, given: dict[str, Any]) -> Iterator[tuple[str, Check]]:
    def answers() -> None:
        one = chat.create(messages=ASKED, **given)
        require(one.choices[0].message.content and one.usage.total_tokens > 100, one)

    def streams() -> None:
        parts = list(chat.create(messages=ASKED, stream=True, stream_options={"include_usage": True}, **given))
        text = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
        require(text == chat.create(messages=ASKED, **given).choices[0].message.content and parts[-1].usage, text)

    def helper_streams() -> None:
        with chat.stream(messages=ASKED, **given) as events:
            require(any(event.type == "content.done" for event in events))

    def several() -> None:
        one = chat.create(messages=ASKED, n=2, seed=1, **{**given, "temperature": 1})
        require([c.index for c in one.choices] == [0, 1], one)

    def likelihoods() -> None:
        tokens = chat.create(messages=ASKED, logprobs=True, top_logprobs=2, **given).choices[0].logprobs.content
        require(tokens and all(len(t.top_logprobs) == 2 and t.logprob <= 0 for t in tokens), tokens)

    def stops() -> None:
        one = chat.create(messages=ASKED, stop=["4", "U", "2"], **given)
        require(one.choices[0].finish_reason == "stop", one)

    def schemas() -> None:
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
        one = chat.create(messages=ASKED, response_format=form, **{**given, "max_tokens": 64})
        require(isinstance(json.loads(one.choices[0].message.content)["shapes"], int), one)

    def tools() -> None:
        one = chat.create(messages=ASKED, tools=[{"type": "function", "function": WEATHER}], tool_choice="required",
                          **{**given, "max_tokens": 128})  # fmt: skip
        call = one.choices[0].message.tool_calls[0].function
        require(call.name == "weather" and "town" in json.loads(call.arguments), one)

    def tools_in_a_stream() -> None:
        with chat.stream(messages=ASKED, tools=[{"type": "function", "function": WEATHER}], tool_choice="required",
                         **{**given, "max_tokens": 128}) as events:  # fmt: skip
            kinds = Counter(event.type for event in events)
            call = events.get_final_completion().choices[0].message.tool_calls[0].function
        require(kinds["tool_calls.function.arguments.delta"], kinds)
        require(call.name == "weather" and "town" in json.loads(call.arguments), call)

    yield from named(answers, streams, helper_streams, several, likelihoods, stops, schemas, tools, tools_in_a_stream)


def of_more_chats(chat: Any, given: dict[str, Any]) -> Iterator[tuple[str, Check]]:
    from pydantic import BaseModel, Field

    def several_without_a_temperature() -> None:
        said = [{"role": "user", "content": "What is the code?"}]  # any code is right: there is no picture
        one = chat.create(messages=said, n=6, model=given["model"], max_tokens=24)
        require(len({choice.message.content for choice in one.choices}) > 1, one)

    def parses() -> None:
        class Count(BaseModel):
            shapes: int = Field(ge=0, le=9)

        one = chat.parse(messages=ASKED, response_format=Count, **given)
        require(0 <= one.choices[0].message.parsed.shapes <= 9, one)

    def no_limit() -> None:
        one = chat.create(messages=ASKED, seed=-1, extra_body={"top_k": -1, "repeat_last_n": -1},
                          **{**given, "max_tokens": -1})  # fmt: skip
        require(one.choices[0].finish_reason == "stop", one)

    def older_functions() -> None:
        one = chat.create(messages=ASKED, functions=[WEATHER], function_call={"name": "weather"},
                          **{**given, "max_tokens": 128})  # fmt: skip
        require(one.choices[0].message.function_call.name == "weather" and not one.choices[0].message.tool_calls, one)

    def pictures_of_tools() -> None:
        call = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        said = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_0", "content": [URL]}]  # fmt: skip
        require(chat.create(messages=said, **given).usage.prompt_tokens > 100)

    def unknown_parts() -> None:
        part = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
        try:
            chat.create(messages=[{"role": "user", "content": [part]}], **given)
        except Exception as error:
            require("input_audio are not supported" in str(error), error)
        else:
            require(False)

    yield from named(several_without_a_temperature, parses, no_limit, older_functions, pictures_of_tools, unknown_parts)


def of_other_routes(client: Any, given: dict[str, Any]) -> Iterator[tuple[str, Check]]:
    import openai

    def responds() -> None:
        parts = [{"type": "input_image", "image_url": URL["image_url"]["url"], "detail": "auto"},
                 {"type": "input_text", "text": "What is the code?"}]  # fmt: skip
        one = client.responses.create(model=given["model"], input=[{"role": "user", "content": parts}],
                                      max_output_tokens=24)  # fmt: skip
        require(one.output_text and one.status in ("completed", "incomplete"), one)

    def responds_in_a_stream() -> None:
        events = list(client.responses.create(model=given["model"], input="Hello", max_output_tokens=8, stream=True))
        require(events[0].type == "response.created" and events[-1].type.startswith("response."), events[-1])

    def refuses() -> None:
        try:
            client.chat.completions.create(messages=ASKED, **{**given, "temperature": -1})
        except openai.BadRequestError as error:
            require(error.param == "temperature" and error.status_code == 400, error)
        else:
            require(False)

    def waits_for_nothing() -> None:
        async def both() -> list[Any]:
            async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none") as other:
                return await asyncio.gather(*[other.chat.completions.create(messages=ASKED, **given) for _ in "ab"])

        first, second = asyncio.run(both())
        require(first.choices[0].message.content == second.choices[0].message.content)

    def completes() -> None:
        one = client.completions.create(model=given["model"], prompt="USER: Say anything.\nASSISTANT:", max_tokens=8)
        require(one.choices[0].finish_reason and one.usage.completion_tokens, one)

    yield from named(responds, responds_in_a_stream, refuses, waits_for_nothing, completes)


def of_anthropic(url: str) -> Iterator[tuple[str, Check]]:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}
    asked: list[Any] = [{"role": "user", "content": [image, {"type": "text", "text": "What is the code?"}]}]
    given: dict[str, Any] = {"model": "demo-model", "max_tokens": 24, "messages": asked}

    def answers() -> None:
        one = client.messages.create(**given)
        read = one.usage.input_tokens + (one.usage.cache_read_input_tokens or 0)
        require(one.content[0].text and read > 100 and one.stop_reason, one)

    def streams() -> None:
        with client.messages.stream(**given) as events:
            require("".join(events.text_stream) and events.get_final_message().stop_reason)

    def counts() -> None:
        require(client.messages.count_tokens(model=given["model"], messages=asked).input_tokens > 100)

    def system() -> None:
        require(client.messages.create(system="Be short.", **given).content)

    def tools() -> None:
        tool = {"name": "weather", "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}
        one = client.messages.create(tools=[tool], tool_choice={"type": "any"}, **{**given, "max_tokens": 128})
        require([b.input.keys() for b in one.content if b.type == "tool_use"] == [{"town"}], one)

    def pictures_of_tools() -> None:
        call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "a", "content": [image]}
        said: list[Any] = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": [call]},
                           {"role": "user", "content": [result]}]  # fmt: skip
        require(client.messages.count_tokens(model=given["model"], messages=said).input_tokens > 100)

    def refuses() -> None:
        try:
            client.messages.create(**{**given, "max_tokens": 0})
        except anthropic.BadRequestError as error:
            require(error.status_code == 400)
        else:
            require(False)

    yield from named(answers, streams, counts, system, tools, pictures_of_tools, refuses)


def of_langchain(url: str) -> Iterator[tuple[str, Check]]:
    from langchain_core.messages import AIMessage, HumanMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="demo-model", temperature=0, max_tokens=24,
                       max_retries=0)  # fmt: skip
    asked = HumanMessage(content=ASKED[0]["content"])

    def answers() -> None:
        one = model.invoke([asked])
        require(one.content and one.usage_metadata["input_tokens"] > 100, one)

    def streams() -> None:
        require("".join(part.content for part in model.stream([asked])) == model.invoke([asked]).content)

    def batches() -> None:
        first, second = model.batch([[asked], [asked]])
        require(first.content == second.content)

    def goes_on() -> None:
        said = model.invoke([asked])
        require(model.invoke([asked, AIMessage(said.content), HumanMessage("How many shapes are there?")]).content)

    def asynchronous() -> None:
        require(asyncio.run(model.ainvoke([asked])).content)

    def structured() -> None:
        schema = {"title": "n", **SCHEMA}
        longer = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="demo-model", temperature=0, max_tokens=96)
        found = longer.with_structured_output(schema, method="json_schema").invoke([asked])
        require(isinstance(found["shapes"], int), found)

    def tools() -> None:
        longer = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="demo-model", temperature=0, max_tokens=128)
        bound = longer.bind_tools([{"type": "function", "function": WEATHER}], tool_choice="weather")
        require(bound.invoke([asked]).tool_calls[0]["name"] == "weather")

    def through_responses() -> None:
        other = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="demo-model", use_responses_api=True,
                           max_tokens=24)  # fmt: skip
        require(other.invoke("Hello").content)

    yield from named(answers, streams, batches, goes_on, asynchronous, structured, tools, through_responses)


def of_litellm(url: str) -> Iterator[tuple[str, Check]]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it fetches prices from the network
    import litellm

    given: dict[str, Any] = {"model": "openai/demo-model", "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 24}

    def answers() -> None:
        require(litellm.completion(messages=ASKED, temperature=0, **given).choices[0].message.content)

    def streams() -> None:
        parts = list(litellm.completion(messages=ASKED, stream=True, **given))
        require("".join(part.choices[0].delta.content or "" for part in parts))

    def tools() -> None:
        tool = {"type": "function", "function": WEATHER}
        one = litellm.completion(messages=ASKED, tools=[tool], tool_choice="required", **{**given, "max_tokens": 128})
        require(one.choices[0].message.tool_calls[0].function.name == "weather", one)

    def structured() -> None:
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
        one = litellm.completion(messages=ASKED, response_format=form, **given)
        require(0 <= json.loads(one.choices[0].message.content)["shapes"] <= 9, one)

    def completes() -> None:
        asked = {**given, "model": "text-completion-openai/demo-model"}
        require(litellm.text_completion(prompt="USER: Say anything.\nASSISTANT:", **asked).choices[0].text)

    def anthropic_form() -> None:
        asked = {**given, "model": "anthropic/demo-model", "api_base": url}
        require(litellm.completion(messages=[{"role": "user", "content": "Hello"}], **asked).choices[0].message.content)

    yield from named(answers, streams, tools, structured, completes, anthropic_form)


def of_instructor(url: str) -> Iterator[tuple[str, Check]]:
    import instructor
    import openai
    from pydantic import BaseModel, Field

    class Count(BaseModel):
        shapes: int = Field(ge=0, le=9)

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    given: dict[str, Any] = {"model": "demo-model", "messages": ASKED, "response_model": Count, "max_retries": 0,
                             "max_tokens": 128, "temperature": 0}  # fmt: skip

    def by_schema() -> None:
        found = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA).chat.completions.create(**given)
        require(0 <= found.shapes <= 9, found)

    def by_tools() -> None:
        found = instructor.from_openai(client, mode=instructor.Mode.TOOLS).chat.completions.create(**given)
        require(0 <= found.shapes <= 9, found)

    def streams() -> None:
        told = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA).chat.completions
        found = list(told.create_partial(**given))
        require(0 <= found[-1].shapes <= 9, found)

    yield from named(by_schema, by_tools, streams)


def of_pydantic_ai(url: str) -> Iterator[tuple[str, Check]]:
    from pydantic import BaseModel, Field
    from pydantic_ai import Agent, BinaryContent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Count(BaseModel):
        shapes: int = Field(ge=0, le=9)

    model = OpenAIChatModel("demo-model", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    asked = ["What is the code?", BinaryContent(base64.b64decode(PICTURE), media_type="image/png")]

    def answers() -> None:
        require(Agent(model).run_sync(asked, model_settings={"max_tokens": 24}).output)

    def streams() -> None:
        async def read() -> str:
            async with Agent(model).run_stream(asked, model_settings={"max_tokens": 24}) as running:
                return str(await running.get_output())

        require(asyncio.run(read()))

    def structured() -> None:
        agent = Agent(model, output_type=NativeOutput(Count))
        require(0 <= agent.run_sync(asked, model_settings={"max_tokens": 128}).output.shapes <= 9)

    def tools() -> None:
        found = Agent(model, output_type=ToolOutput(Count)).run_sync(asked, model_settings={"max_tokens": 128})
        require(0 <= found.output.shapes <= 9, found)

    yield from named(answers, streams, structured, tools)


def of_llm(url: str) -> Iterator[tuple[str, Check]]:
    from llm import Attachment, Tool
    from llm.default_plugins.openai_models import Chat

    model = Chat("demo-model", key="none", model_name="demo-model", api_base=f"{url}/v1", vision=True,
                 supports_schema=True, supports_tools=True)  # fmt: skip
    seen = [Attachment(type="image/png", content=base64.b64decode(PICTURE))]

    def answers() -> None:
        require(model.prompt("What is the code?", attachments=seen, stream=False, key="none", max_tokens=24).text())

    def streams() -> None:
        require("".join(model.prompt("What is the code?", attachments=seen, key="none", max_tokens=24)))

    def schemas() -> None:
        text = model.prompt("Count.", attachments=seen, schema=SCHEMA, stream=False, key="none", max_tokens=96).text()
        require(isinstance(json.loads(text)["shapes"], int), text)

    def tools() -> None:
        """Offers a tool. The model may answer without a call."""
        look = Tool(name="look", description="Looks.", input_schema=WEATHER["parameters"])
        require(model.prompt("Hello", tools=[look], stream=False, key="none", max_tokens=24).text())

    yield from named(answers, streams, schemas, tools)


def named(*checks: Check) -> Iterator[tuple[str, Check]]:
    for check in checks:
        yield check.__name__.replace("_", " "), check


CLIENTS = {"openai": of_openai, "anthropic": of_anthropic, "langchain-openai": of_langchain, "litellm": of_litellm,
           "instructor": of_instructor, "pydantic-ai-slim": of_pydantic_ai, "llm": of_llm}  # fmt: skip


def tried(package: str, url: str) -> dict[str, Any]:
    """Runs the checks of a client. Returns its version, the passed checks and the errors of the failed checks."""
    passed, failed = [], {}
    for name, check in CLIENTS[package](url):
        try:
            check()
            passed.append(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    return {"client": package, "version": importlib.metadata.version(package), "passed": passed, "failed": failed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of the server")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = []
    for package in CLIENTS:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            print(f"{package} is not installed: passed over", file=sys.stderr)
            continue
        found.append(tried(package, args.url.rstrip("/")))
    if args.json:
        print(json.dumps(found))
    else:
        for one in found:
            print(f"{one['client']} {one['version']}: {len(one['passed'])} passed, {len(one['failed'])} failed")
            for name, why in one["failed"].items():
                print(f"  {name}: {why}")
    return 1 if not found or any(one["failed"] for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
