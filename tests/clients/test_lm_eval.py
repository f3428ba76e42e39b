"""`lm-eval` with its model local-completions, the command: its scores are the log-likelihoods that
transformers has of the same weights. Run by a Python that has transformers.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.clients.commands import run_client
from tests.clients.conftest import MODEL

DOCUMENTS = [
    {"question": "The sky is", "choices": ["blue", "a table", "über 3"], "gold": 0},
    {"question": "Two and two are", "choices": ["four", "five", "seven"], "gold": 0},
    {"question": "Rome lies in", "choices": ["Norway", "Italy", "Peru"], "gold": 1},
    {"question": "x" * 700, "choices": ["y", "yy", "yyy"], "gold": 2},
]
TASKS: dict[str, dict[str, Any]] = {
    "chosen": {
        "output_type": "multiple_choice",
        "doc_to_target": "{{gold}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_target": "{{question}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}],
    },
}
# Log-probabilities here are of some -10, where a step of float32 is 1e-6, and both sides sum in
# float32, in orders of their own: a few steps for each token of a text. (5e-7 was seen.)
OF_A_TOKEN = 5e-6


@pytest.fixture(scope="module")
def samples(address: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What the command has logged of each task: its documents, what was asked and what it got."""
    folder = tmp_path_factory.mktemp("lm-eval")
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in DOCUMENTS))
    for name, task in TASKS.items():
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        asked = {"task": name, "test_split": "test", "doc_to_text": "{{question}}", **source}
        (folder / f"{name}.yaml").write_text(json.dumps({**asked, **task}))  # JSON is YAML
    where = f"base_url={address}/v1/completions,tokenizer={MODEL},max_length=2048"
    run_client(
        "lm_eval",
        "run",
        *("--model", "local-completions"),
        *("--model_args", f"model=tiny,{where},num_concurrent=3,max_retries=1"),
        *("--include_path", str(folder), "--tasks", ",".join(TASKS)),
        *("--batch_size", "2", "--log_samples", "--output_path", str(folder / "told")),
        cwd=folder,
    )
    return {
        name: [json.loads(line) for line in path.read_text().splitlines()]
        for name in TASKS
        for path in (folder / "told").glob(f"*/samples_{name}_*.jsonl")
    }


class Reference:
    """transformers' model, in float32."""

    def __init__(self) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self._model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()

    def ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """Of what may follow each token; float32 [len(ids), vocabulary]."""
        with torch.no_grad():
            logits = self._model(torch.tensor([ids])).logits[0]
        return torch.log_softmax(logits.float(), -1)

    def score(self, context: list[int], text: list[int]) -> tuple[float, bool]:
        """A text's log-likelihood behind a context, and whether each token is the likeliest."""
        found = self.logprobs([*context, *text])[len(context) - 1 : -1]
        expected = torch.tensor(text)
        chosen = found.gather(1, expected[:, None]).double()
        return chosen.sum().item(), bool((found.argmax(-1) == expected).all())

    def greedy(self, context: list[int], count: int) -> list[int]:
        found: list[int] = []
        for _ in range(count):
            found.append(int(self.logprobs([*context, *found])[-1].argmax()))
        return found

    def text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)  # type: ignore[no-any-return]

    @property
    def eos(self) -> int:
        return self._tokenizer.eos_token_id  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def test_choices_have_the_log_likelihoods_of_transformers(
    samples: dict[str, list[Any]], reference: Reference
) -> None:
    compared = 0
    for sample in samples["chosen"]:
        for asked, ((told, greedy),) in zip(
            sample["arguments"].values(), sample["resps"], strict=True
        ):
            context, text = reference.ids(asked["arg_0"]), reference.ids(asked["arg_1"])
            expected, likeliest = reference.score(context, text)
            assert math.isclose(float(told), expected, abs_tol=OF_A_TOKEN * len(text))
            assert greedy == str(likeliest)
            compared += 1
    assert compared == 3 * len(DOCUMENTS)


def test_whole_texts_have_the_log_likelihoods_of_transformers(
    samples: dict[str, list[Any]], reference: Reference
) -> None:
    assert len(samples["rolling"]) == len(DOCUMENTS)
    for sample in samples["rolling"]:
        text = reference.ids(sample["doc"]["question"])
        expected, _ = reference.score([reference.eos], text)
        ((told,),) = sample["resps"]
        assert math.isclose(float(told), expected, abs_tol=OF_A_TOKEN * len(text))


def test_answers_are_the_likeliest_tokens_up_to_the_stop(
    samples: dict[str, list[Any]], reference: Reference
) -> None:
    assert len(samples["written"]) == len(DOCUMENTS)
    for sample in samples["written"]:
        ids = reference.greedy(reference.ids(sample["doc"]["question"]), 12)
        ids = ids[: ids.index(reference.eos)] if reference.eos in ids else ids
        expected = reference.text(ids).split("\n")[0]
        assert sample["resps"][0][0] == expected
