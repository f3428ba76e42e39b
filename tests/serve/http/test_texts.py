"""Texts: what takes long is done beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from photon_ext.models.text.model_tokenizer import model_tokenizer
from photon_ext.serve.http.texts import Texts

HELLO = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("chat", [False, True])
def test_hazard_b2_long_texts_are_encoded_beside_the_event_loop(
    model_dir: Path, chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoding waits here for something that only the event loop does."""
    tokenizer = model_tokenizer(model_dir)
    texts, go_on = Texts(tokenizer, 100_000), threading.Event()
    name = "chat_text" if chat else "encode"
    own = getattr(tokenizer, name)

    def slow(*values: Any) -> Any:
        assert go_on.wait(60)
        return own(*values)

    monkeypatch.setattr(tokenizer, name, slow)

    async def encoded() -> Any:
        long = "x" * 20_000
        work = texts.encode_chat(HELLO, size=len(long)) if chat else texts.encode(long)
        task = asyncio.ensure_future(work)
        await asyncio.sleep(0.01)
        assert not task.done()
        go_on.set()
        return await task

    found = asyncio.run(encoded())
    assert len(found.ids if chat else found) > 10


def test_a_begin_is_known_by_the_end_of_the_prompt(model_dir: Path) -> None:
    texts = Texts(model_tokenizer(model_dir), 1000)
    found = asyncio.run(texts.encode_chat(HELLO))
    assert found.tail.endswith("<|im_start|>assistant\n")
