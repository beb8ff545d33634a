"""The official clients, sync and async, against a server process with the embedded model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.process import Server

MODEL = "jaxserve-embedded"
WEATHER: Any = [{"role": "user", "content": "How is the weather in Hanoi today?"}]
SUM: Any = [{"role": "user", "content": "What is 4 + 3?"}]
PARAMETERS: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Name of the city"}},
    "required": ["city"],
}
FUNCTION: Any = {
    "name": "get_weather",
    "description": "Get the current weather of a city.",
    "parameters": PARAMETERS,
}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
GREEDY: Any = {"model": MODEL, "temperature": 0, "max_tokens": 96}
NO_THINKING: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}


class GetWeather(BaseModel):
    """Get the current weather of a city."""

    city: str = Field(description="Name of the city")


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def test_a_thought_and_an_answer_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=SUM, reasoning_effort="high", **GREEDY)
    message: Any = whole.choices[0].message
    assert "7" in message.content
    assert message.reasoning == message.reasoning_content
    assert message.reasoning
    usage: Any = whole.usage
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    with client.chat.completions.stream(
        messages=SUM, reasoning_effort="high", stream_options={"include_usage": True}, **GREEDY
    ) as stream:
        thoughts = [
            getattr(e.chunk.choices[0].delta, "reasoning", None) or ""
            for e in stream
            if e.type == "chunk" and e.chunk.choices
        ]
        final = stream.get_final_completion()
    assert "".join(thoughts) == message.reasoning
    assert final.choices[0].message.content == message.content
    assert final.usage == whole.usage


def test_thinking_can_be_turned_off(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(messages=SUM, reasoning_effort="none", **GREEDY)
    message: Any = reply.choices[0].message
    assert "7" in message.content
    assert not hasattr(message, "reasoning")


def test_a_thought_cut_short_is_all_reasoning(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        messages=SUM, reasoning_effort="high", **{**GREEDY, "max_tokens": 3}
    )
    message: Any = reply.choices[0].message
    assert (message.content, reply.choices[0].finish_reason) == ("", "length")
    assert message.reasoning


def test_tools_are_called_whole_streamed_and_parsed(client: openai.OpenAI) -> None:
    options = {**GREEDY, **NO_THINKING, "messages": WEATHER}
    whole = client.chat.completions.create(tools=TOOLS, **options)
    assert whole.choices[0].finish_reason == "tool_calls"
    (call,) = whole.choices[0].message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Hanoi"}')
    with client.chat.completions.stream(tools=TOOLS, **options) as stream:
        grown = [
            e.arguments_delta for e in stream if e.type == "tool_calls.function.arguments.delta"
        ]
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert len(grown) > 1, "the arguments come as they grow"
    assert streamed.function.arguments == "".join(grown) == call.function.arguments
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    parsed = client.chat.completions.parse(tools=[tool], **options)
    (call,) = parsed.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == GetWeather(city="Hanoi")


def test_a_tools_result_leads_to_an_answer(client: openai.OpenAI) -> None:
    options = {**GREEDY, **NO_THINKING, "tools": TOOLS}
    first = client.chat.completions.create(messages=WEATHER, **options)
    message = first.choices[0].message
    (call,) = message.tool_calls or ()
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"weather": "sunny"}'}
    messages: Any = [*WEATHER, message.to_dict(), result]
    second = client.chat.completions.create(messages=messages, **options)
    assert second.choices[0].finish_reason == "stop"
    assert second.choices[0].message.content


def test_raw_responses_and_completions(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        prompt="Hello", seed=1, extra_headers={"X-Request-Id": "mine"}, **GREEDY
    )
    assert raw.headers["x-request-id"] == "mine"
    text = raw.parse().choices[0].text
    stream = client.completions.create(prompt="Hello", seed=1, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == text


def test_responses_whole_and_streamed(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "strict": False, **FUNCTION}]
    options: Any = {"model": MODEL, "temperature": 0, "input": WEATHER, "tools": tools}
    options["reasoning"] = {"effort": "none"}
    whole = client.responses.create(**options)
    (call,) = [item for item in whole.output if item.type == "function_call"]
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Hanoi"}')
    with client.responses.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    thought = client.responses.create(
        model=MODEL, temperature=0, input="What is 4 + 3?", reasoning={"effort": "high"}
    )
    assert [item.type for item in thought.output] == ["reasoning", "message"]
    assert "7" in thought.output_text


def test_messages_whole_streamed_and_counted(claude: anthropic.Anthropic) -> None:
    tools: Any = [
        {
            "name": FUNCTION["name"],
            "description": FUNCTION["description"],
            "input_schema": PARAMETERS,
        }
    ]
    prompt: Any = {"model": MODEL, "messages": WEATHER, "tools": tools}
    options = {**prompt, "max_tokens": 96, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**options)
    assert whole.stop_reason == "tool_use"
    (use,) = [block for block in whole.content if block.type == "tool_use"]
    assert (use.name, use.input) == ("get_weather", {"city": "Hanoi"})
    with claude.messages.stream(**options) as stream:
        final = stream.get_final_message()
    assert [b.type for b in final.content] == [b.type for b in whole.content]
    usage = whole.usage  # what an earlier test left in the prefix cache is counted apart
    counted = claude.messages.count_tokens(**prompt).input_tokens
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_messages_with_thinking(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(
        model=MODEL,
        max_tokens=2000,
        messages=SUM,
        thinking={"type": "enabled", "budget_tokens": 1024},
        extra_body={"temperature": 0},
    ) as stream:
        texts = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert "7" in texts


async def test_the_async_clients_get_the_same(server: Server, client: openai.OpenAI) -> None:
    options = {**GREEDY, **NO_THINKING, "messages": WEATHER, "tools": TOOLS}
    expected = client.chat.completions.create(**options).choices[0].message.tool_calls
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        async with api.chat.completions.stream(**options) as stream:
            final = await stream.get_final_completion()
        response = await api.responses.create(model=MODEL, input="Hello!", temperature=0)
    (call,) = final.choices[0].message.tool_calls or ()
    assert expected and call.function.arguments == expected[0].function.arguments
    assert response.output_text
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as api:
        message = await api.messages.create(model=MODEL, max_tokens=96, messages=SUM)
    assert message.content[0].type == "text"


class Answer(BaseModel):
    """Of bounded length, whatever the model likes."""

    city: Literal["Paris", "London"]
    sure: bool


def test_answers_are_parsed_into_types(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    content = "What is the capital of France?"
    asked: Any = [{"role": "user", "content": content}]
    chat = client.chat.completions.parse(
        messages=asked, response_format=Answer, reasoning_effort="none", **GREEDY
    )
    assert isinstance(chat.choices[0].message.parsed, Answer)
    response = client.responses.parse(
        model=MODEL, temperature=0, input=content, text_format=Answer, reasoning={"effort": "none"}
    )
    assert isinstance(response.output_parsed, Answer)
    schema = {**Answer.model_json_schema(), "additionalProperties": False}
    message = claude.messages.create(
        model=MODEL,
        max_tokens=96,
        messages=asked,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert message.content[0].type == "text"
    Answer.model_validate_json(message.content[0].text)


def test_a_call_can_be_forced(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    chat = client.chat.completions.create(
        messages=WEATHER, tools=TOOLS, tool_choice=choice, **GREEDY
    )
    (call,) = chat.choices[0].message.tool_calls or ()
    GetWeather.model_validate_json(call.function.arguments)
    message = claude.messages.create(
        model=MODEL,
        max_tokens=96,
        messages=WEATHER,
        tools=[{"name": "get_weather", "input_schema": PARAMETERS}],
        tool_choice={"type": "tool", "name": "get_weather"},
    )
    assert message.stop_reason == "tool_use"
