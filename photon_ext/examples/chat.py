"""A conversation: one answer whole, the next piece by piece.

python -m photon_ext.examples.chat --model smollm2
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from photon_ext import Engine, SamplingParams


def main(argv: Sequence[str] | None = None) -> None:
    """Asks two questions; the second is about the first."""
    parser = argparse.ArgumentParser(description="Two turns of a conversation.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--first", default="Name a colour of the sky.")
    parser.add_argument("--second", default="Why is it that colour?")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    options = parser.parse_args(argv)
    params = SamplingParams(max_new_tokens=options.max_new_tokens)

    with Engine.from_pretrained(options.model, device=options.device, max_rows=1) as engine:
        messages = [{"role": "user", "content": options.first}]
        answer = engine.chat(messages, params)
        print(answer.text)

        # the engine keeps nothing of a conversation: the next call gets all of it
        messages.append({"role": "assistant", "content": answer.text})
        messages.append({"role": "user", "content": options.second})
        for event in engine.submit(messages, params).iter():
            print(event.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
