"""`instructor`: answers as objects, in each of its ways to ask for them."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import instructor
import openai
import pytest
from pydantic import BaseModel, Field, field_validator

from tests.clients.conftest import KEY

ASK: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_retries": 1}
MODES = [
    instructor.Mode.TOOLS,
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.RESPONSES_TOOLS,
]


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Rome", "Oslo"]
    degrees: int = Field(ge=-50, le=50)
    rain: bool


@pytest.mark.parametrize("mode", MODES)
def test_an_object_of_a_random_model(address: str, mode: instructor.Mode) -> None:
    client = instructor.from_openai(_openai(address), mode=mode)
    assert isinstance(client.create(response_model=Weather, **ASK), Weather)


@pytest.mark.parametrize("mode", [*MODES[:2], instructor.Mode.JSON])
def test_an_object_that_comes_in_parts(scripted_address: str, mode: instructor.Mode) -> None:
    class Said(BaseModel):
        first: str
        second: str

    asked = {**ASK, "messages": [{"role": "user", "content": "Say 'first' and 'second'"}]}
    client = instructor.from_openai(_openai(scripted_address), mode=mode)
    *parts, last = client.create_partial(response_model=Said, **asked)
    assert len(parts) > 2
    assert isinstance(last.first, str)
    assert isinstance(last.second, str)


def test_a_list_of_objects_and_async(scripted_address: str) -> None:
    client = instructor.from_openai(_openai(scripted_address))
    found = list(client.create_iterable(response_model=Weather, **ASK))
    expected = {"city": "Rome", "degrees": 1, "rain": True}
    assert [one.model_dump() for one in found] == [expected]

    async def asked() -> Weather:
        async with openai.AsyncOpenAI(base_url=f"{scripted_address}/v1", api_key=KEY) as own:
            return await instructor.from_openai(own).create(response_model=Weather, **ASK)

    assert asyncio.run(asked()).model_dump() == expected


def test_a_wrong_answer_goes_back_with_the_fault(scripted_address: str) -> None:
    """The client asks again, with the answer and what was wrong with it."""
    faults = []

    class Told(BaseModel):
        number: int

        @field_validator("number")
        @classmethod
        def more(cls, number: int) -> int:
            if not faults:
                faults.append(number)
                raise ValueError("say another")
            return number

    client = instructor.from_openai(_openai(scripted_address))
    assert client.create(response_model=Told, **{**ASK, "max_retries": 3}).number == 1
    assert faults == [1]


def _openai(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)
