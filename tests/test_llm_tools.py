"""Conversations with tools and reasoning in Python: chat and stream_chat of LLM and AsyncLLM."""

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.scripted import HERMES, HERMES_CONTROL, scripted_llm, scripted_model

from kvarn import LLM, AsyncLLM, KvarnError
from kvarn.chats.answer import ToolCall
from kvarn.dialect import CallArguments, CallBegin, CallEnd, Content, Reasoning, joined
from kvarn.dialect.grammar import MOST_CALLS
from kvarn.jobs.job import Output

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": CITY}}]
OSLO = '{"city": "Oslo"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'
TEXTS = {
    "text": "It is sunny.",
    "call": CALL,
    "think": f"<think>\nWhere?\n</think>\n\nI ask.\n{CALL}",
    "json": f"<think>\nWhere?\n</think>\n\n{OSLO}",
    "opened": f"Where?\n</think>\n\n{OSLO}",
    "again": "\n".join([CALL] * 20),
    "broken": "<tool_call>\nnothing\n</tool_call>",
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = scripted_model(tmp_path_factory.mktemp("model") / "tiny.gguf", HERMES, HERMES_CONTROL)
    with scripted_llm(model, TEXTS) as llm:
        yield llm


def test_a_call_and_its_result(llm: LLM) -> None:
    messages = [{"role": "user", "content": "play think"}]
    output = llm.chat(messages, tools=TOOLS, temperature=0)
    (call,) = output.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
    assert (output.text, output.reasoning, output.finish_reason) == ("I ask.", "Where?", "tool_calls")
    messages += [output.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny; play text"}]
    assert llm.chat(messages, tools=TOOLS, temperature=0).text == TEXTS["text"]
    prompt = llm.tokenizer.decode(llm.render(messages, tools=TOOLS), special=True)
    assert f"<think>\nWhere?\n</think>\n\nI ask.\n{CALL}<|im_end|>" in prompt
    assert "<|im_start|>tool\nsunny; play text<|im_end|>" in prompt


def test_a_required_call(llm: LLM) -> None:
    output = llm.chat("play text", tools=TOOLS, tool_choice="required", temperature=0, max_tokens=200)
    assert output.finish_reason == "tool_calls"
    assert isinstance(json.loads(output.tool_calls[0].arguments)["city"], str)


def test_without_tools_a_call_is_text(llm: LLM) -> None:
    output = llm.chat("play call", temperature=0)
    assert (output.text, output.tool_calls, output.reasoning) == (CALL, [], "")
    assert output.message == {"role": "assistant", "content": CALL}
    broken = llm.chat("play broken", tools=TOOLS, temperature=0)
    assert broken.text == TEXTS["broken"]
    assert broken.tool_error


def test_a_structure_begins_after_reasoning(llm: LLM) -> None:
    output = llm.chat("play json", temperature=0, json_schema=CITY)
    assert (output.reasoning, output.text) == ("Where?", OSLO)


def test_several_conversations_and_samples(llm: LLM) -> None:
    outputs = llm.chat(["play call", "play text"], tools=TOOLS, n=2, temperature=0)
    calls = [[len(each.tool_calls) for each in output.completions] for output in outputs]
    assert calls == [[1, 1], [0, 0]]
    ids = [each.tool_calls[0].id for each in outputs[0].completions]
    assert ids[0] != ids[1]


def test_variables_of_the_template(llm: LLM) -> None:
    closed = llm.render("a", chat_template_kwargs={"enable_thinking": False})
    assert llm.tokenizer.decode(closed).endswith("</think>\n\n")
    output = llm.chat("play text", temperature=0, chat_template_kwargs={"enable_thinking": False})
    assert output.prompt_token_ids == llm.render("play text", chat_template_kwargs={"enable_thinking": False})


def test_async(llm: LLM) -> None:
    async def play() -> list[ToolCall]:
        output = await AsyncLLM(llm).chat("play call", tools=TOOLS, temperature=0)
        return output.tool_calls

    (call,) = asyncio.run(play())
    assert (call.name, call.arguments) == ("weather", OSLO)


def without_ids(output: Output) -> list:
    return [replace(each, tool_calls=[replace(call, id="") for call in each.tool_calls]) for each in output.completions]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["alone", "tools"])
def test_a_stream_has_the_content_and_its_output_the_rest(llm: LLM, name: str, tools: list) -> None:
    want = llm.chat(f"play {name}", tools=tools, temperature=0)
    stream = llm.stream_chat(f"play {name}", tools=tools, temperature=0)
    pieces = list(stream)
    assert all(pieces)
    assert "".join(pieces) == stream.output.text == want.text
    assert without_ids(stream.output) == without_ids(want)
    assert stream.output == stream.output, "its calls keep their ids"

    async def asynchronous() -> None:
        stream = AsyncLLM(llm).stream_chat(f"play {name}", tools=tools, temperature=0)
        assert "".join([piece async for piece in stream]) == want.text
        assert without_ids(stream.output) == without_ids(want)

    asyncio.run(asynchronous())


def test_the_parts_of_a_stream(llm: LLM) -> None:
    stream = llm.stream_chat("play think", tools=TOOLS, temperature=0)
    parts = list(stream.parts())
    assert sum(isinstance(part, Reasoning) for part in parts) > 1, "they come as they are computed"
    (call,) = stream.output.tool_calls
    assert joined(parts) == [
        Reasoning("Where?"),
        Content("I ask."),
        CallBegin(0, call.id, "weather"),
        CallArguments(0, OSLO),
        CallEnd(0),
    ]
    assert list(stream) == [], "a part comes once"

    async def asynchronous() -> None:
        stream = AsyncLLM(llm).stream_chat("play think", tools=TOOLS, temperature=0)
        there = joined([part async for part in stream.parts()])
        assert [part for part in there if not isinstance(part, CallBegin)] == joined(parts)[:2] + joined(parts)[3:]
        assert [part.id for part in there if isinstance(part, CallBegin)] == [stream.output.tool_calls[0].id]

    asyncio.run(asynchronous())
    assert joined(llm.stream("play text", max_tokens=3, temperature=0).parts()) == [Content("It ")]


def test_a_call_that_is_being_written_is_none_yet(llm: LLM) -> None:
    with llm.stream_chat("play call", tools=TOOLS, temperature=0) as stream:
        parts = stream.parts()
        assert isinstance(next(parts), CallBegin)
        assert (stream.output.tool_calls, stream.output.text, stream.output.finish_reason) == ([], "", None)
        assert stream.output.tool_error is None
    assert list(parts) == [], "a closed stream has no more parts"
    assert stream.output.finish_reason == "cancelled"
    assert stream.output.tool_calls == []
    assert not llm.engine.busy


def test_leaving_the_parts_frees_what_the_stream_held(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in llm.stream_chat("play think", temperature=0).parts():
        assert isinstance(part, Reasoning)
        assert llm.engine.busy
        break
    assert not llm.engine.busy

    async def asynchronous() -> None:
        model, endless = AsyncLLM(llm), {"temperature": 0, "ignore_eos": True, "max_tokens": 1900}
        async for part in model.stream_chat("play think", **endless).parts():
            assert isinstance(part, Reasoning)
            break
        while llm.runner.busy:
            await asyncio.sleep(0.001)

    before, left = llm.engine.stats.generated_tokens, threading.Event()
    step, cancel = llm.engine.step, llm.runner.cancel

    def held_step():  # the model does not run away while the stream is being left
        if llm.engine.stats.generated_tokens - before > 20:
            assert left.wait(60), "the stream was left, and its request goes on"
        return step()

    def noted_cancel(job):
        left.set()
        return cancel(job)

    monkeypatch.setattr(llm.engine, "step", held_step)
    monkeypatch.setattr(llm.runner, "cancel", noted_cancel)
    asyncio.run(asynchronous())
    assert llm.engine.stats.generated_tokens - before < 1900
    assert llm.cache.usage().sequences == 0


def test_a_structure_of_a_stream_begins_after_reasoning(llm: LLM) -> None:
    for variables in ({}, {"open": True}):
        name = "opened" if variables else "json"
        stream = llm.stream_chat(f"play {name}", temperature=0, json_schema=CITY, chat_template_kwargs=variables)
        assert "".join(stream) == OSLO
        assert stream.output.reasoning == "Where?"


def test_a_required_call_of_a_stream(llm: LLM) -> None:
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0, "max_tokens": 200}
    stream = llm.stream_chat("play text", tools=TOOLS, **fields)
    assert list(stream) == []
    assert stream.output.finish_reason == "tool_calls"
    assert len(stream.output.tool_calls) == 1


def test_an_answer_of_repeated_calls_ends(llm: LLM) -> None:
    output = llm.chat("play again", tools=TOOLS, tool_choice="required", temperature=0, max_tokens=1900)
    assert output.finish_reason == "tool_calls"
    assert len(output.tool_calls) == MOST_CALLS


def given(**fields: object) -> dict:
    return {"type": "function", "function": {"name": "f", **fields}}


def test_no_tools_and_variables_of_any_name(llm: LLM) -> None:
    plain = llm.chat("play text").text
    assert llm.chat("play text", tools=None, chat_template_kwargs={"self": 1, "names": 2}).text == plain


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [{"name": "f"}]}, r"tools\[0\] is not a function"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": 3}}]}, "description must be a text"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice must be none, auto, required"),
        ({"tool_choice": "required"}, "there is no function to call"),
        ({"tools": TOOLS * 600}, "at most 512"),
        ({"tools": TOOLS[0]}, "tools must be a list"),
        ({"tools": "x"}, "tools must be a list"),
        ({"tools": [print]}, r"tools\[0\] is not a function"),
        ({"tools": [given(parameters={"type": "array"})]}, "parameters.type is 'array'; it must be object"),
        ({"tools": [given(parameters={"properties": {"a": {"enum": {1}}}})]}, r"tools\[0\] cannot be written as JSON"),
        ({"tools": [given(strict="yes")]}, "strict must be true or false"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls must be true or false"),
    ],
)
def test_wrong_tools_are_refused(llm: LLM, fields: dict, words: str) -> None:
    for ask in (llm.chat, llm.stream_chat, AsyncLLM(llm).stream_chat):
        with pytest.raises(KvarnError, match=words):
            ask("play text", **fields)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (3, "chat_template_kwargs is 3"),
        ({1: 2}, "a key that is not a name"),
        ({"messages": []}, "chat_template_kwargs.messages cannot be set"),
        ({"tools": []}, "chat_template_kwargs.tools cannot be set"),
    ],
)
def test_wrong_variables_are_refused(llm: LLM, variables: Any, words: str) -> None:
    for ask in (llm.chat, llm.stream_chat):
        with pytest.raises(KvarnError, match=words):
            ask("play text", chat_template_kwargs=variables)


def test_wrong_calls_in_messages_are_refused(llm: LLM) -> None:
    for calls in ("x", [1], [{"function": "f"}], [{"function": {}}]):
        with pytest.raises(KvarnError, match="message 1 has tool_calls of another form"):
            llm.chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": calls}])
    with pytest.raises(KvarnError, match="message 0 has no content"):
        llm.chat([{"role": "assistant", "content": None, "tool_calls": []}])
