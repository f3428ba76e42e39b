"""An answer that is JSON of a schema, as a Python object.

python -m photon_ext.examples.json_answer --prompt "Ada Lovelace was born in 1815."
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from photon_ext import Engine, SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 30},
        "born": {"type": "integer", "minimum": 1000, "maximum": 2100},
    },
    "required": ["name", "born"],
    "additionalProperties": False,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Asks for a person and prints the two properties."""
    parser = argparse.ArgumentParser(description="An answer as JSON of a schema.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompt", default="Who was Ada Lovelace, and when was she born?")
    options = parser.parse_args(argv)

    with Engine.from_pretrained(options.model, device=options.device, max_rows=1) as engine:
        params = SamplingParams(json_schema=PERSON, max_new_tokens=100)
        answer = engine.generate([options.prompt], params)[0]
        if answer.finish_reason != "stop":  # cut by its cap: no whole JSON
            raise SystemExit(answer.error or f"the answer ended by {answer.stop_reason}")
        person = json.loads(answer.text)
        print(f"{person['name']}, born in {person['born']}")


if __name__ == "__main__":
    main()
