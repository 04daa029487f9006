"""Run in an environment of their own: what other clients make of a server.

Usage: clients_check.py URL
"""

import json
import sys
from typing import Any, Literal

import instructor
import litellm
import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    """Tells the weather."""

    days: Literal[1, 2, 3]


def with_litellm(url: str) -> dict[str, Any]:
    """Whole, as a stream, with a tool, and where the context ends."""
    asked: dict[str, Any] = {"model": "openai/small", "api_base": url, "api_key": "none", "temperature": 0}
    asked["messages"] = [{"role": "user", "content": "say hello"}]
    whole = litellm.completion(**asked, max_tokens=20)
    pieces = list(litellm.completion(**asked, max_tokens=20, stream=True))
    tool = openai.pydantic_function_tool(Weather, name="weather")
    choice = {"type": "function", "function": {"name": "weather"}}
    called = litellm.completion(**asked, tools=[tool], tool_choice=choice, stream=True)
    call = litellm.stream_chunk_builder(list(called)).choices[0].message.tool_calls[0]
    response = litellm.responses(
        **{k: v for k, v in asked.items() if k != "messages"}, input="say hello", max_output_tokens=20
    )
    try:
        litellm.completion(**asked | {"messages": [{"role": "user", "content": "x" * 300}]}, max_tokens=5)
        error = ""
    except litellm.ContextWindowExceededError as problem:
        error = type(problem).__name__
    return {
        "text": whole.choices[0].message.content,
        "streamed": "".join(piece.choices[0].delta.content or "" for piece in pieces),
        "days": Weather.model_validate_json(call.function.arguments).days,
        "response": response.output[0].content[0].text,
        "error": error,
    }


def with_langchain(url: str) -> dict[str, Any]:
    """By both of its ways: whole, as a stream, with a tool and what the tool gave."""
    told = {}
    for name, more in (("chat", {}), ("responses", {"use_responses_api": True})):
        model = ChatOpenAI(base_url=url, api_key="none", model="small", temperature=0, max_retries=0, **more)
        short = model.bind(max_tokens=20)
        said = short.invoke("say hello").text
        streamed = "".join(piece.text for piece in short.stream("say hello"))
        calling = model.bind_tools([Weather], tool_choice="required", parallel_tool_calls=False)
        call = calling.invoke("say hello")
        pieces = list(calling.stream("say hello"))
        given = ToolMessage("sunny", tool_call_id=call.tool_calls[0]["id"])
        after = short.invoke([HumanMessage("say hello"), call, given]).text
        schema = model.with_structured_output(Weather, method="json_schema").invoke("say hello")
        arguments = "".join(chunk["args"] or "" for piece in pieces for chunk in piece.tool_call_chunks)
        told[name] = {
            "text": said, "streamed": streamed, "days": Weather(**call.tool_calls[0]["args"]).days,
            "streamed_days": json.loads(arguments)["days"], "after": bool(after), "schema": schema.days,
        }  # fmt: skip
    return told


def with_instructor(url: str) -> dict[str, Any]:
    """By both of its ways."""
    told = {}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=mode)
        found = client.chat.completions.create(
            model="small", messages=[{"role": "user", "content": "say hello"}], response_model=Weather, temperature=0
        )
        told[mode.name] = found.days
    return told


def main(url: str) -> None:
    """Print what each has got."""
    told = {"litellm": with_litellm(url), "langchain": with_langchain(url), "instructor": with_instructor(url)}
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
