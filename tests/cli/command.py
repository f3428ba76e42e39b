"""What the tests of the command line share: a tiny model that speaks in words, and how to run a
command here or in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from photon_ext.cli import main
from tests.models.tiny import VOCAB, saved_tiny_model

ROOT = Path(__file__).resolve().parents[2]
# of a turn: w1 for the system, w2 for the user, w3 for the assistant
TEMPLATE = (
    "{% for m in messages %}"
    "{{ {'system': 'w1', 'user': 'w2', 'assistant': 'w3'}[m.role] }} {{ m.content }} "
    "{% endfor %}"
)


def save_with_words(folder: Path, letter: str) -> None:
    saved_tiny_model("llama-plain", folder)
    backend = Backend(
        models.WordLevel({f"{letter}{i}": i for i in range(VOCAB)}, unk_token=f"{letter}0")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.save(str(folder / "tokenizer.json"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    try:
        code = main(arguments)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def save_with_template(folder: Path) -> None:
    """The same, with a chat template."""
    save_with_words(folder, "w")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | more


def entries() -> list[str]:
    """How the command line is started."""
    return ["python -m photon_ext", "photon-ext"]


def blocked_torch(folder: Path, program: str) -> None:
    """A torch that runs `program` when it is imported, for processes whose path begins there."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(program)


def run_process(entry: str, path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, whose modules are looked for in `path` first."""
    line = [sys.executable, "-m", "photon_ext"]
    if entry == "photon-ext":  # as an installer writes it
        script = path / "photon-ext"
        script.write_text("import sys\nfrom photon_ext.cli import main\nsys.exit(main())\n")
        line = [sys.executable, str(script)]
    return subprocess.run(
        [*line, *arguments],
        env=environment(PYTHONPATH=os.pathsep.join([str(path), str(ROOT)])),
        capture_output=True,
        text=True,
        timeout=120,
    )
