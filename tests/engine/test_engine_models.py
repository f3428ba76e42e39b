"""The engine over real decoders: its tokens are transformers' tokens, whatever the depth, the
batch, the chunks and the traffic.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from benchmarks.cpu import reference_model
from photon_ext.engine import Engine
from photon_ext.models.loading.loader import LoadedModel
from photon_ext.sampling import SamplingParams, from_allowed_ids
from tests.models.tiny import TINY, VOCAB, greedy_ids, saved_tiny_model

LENGTHS = (1, 10, 33)
NEW = 10
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def prompt_of(length: int, vocab: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, vocab, (length,), generator=generator).tolist()


def tiny_engine(folder: Path, depth: int, device: str = "cpu", **options: object) -> Engine:
    sizes = {
        "max_rows": 4,
        "max_len": 64,
        "page_size": 5,
        "chunk": 9,
        "buckets": (1, 2),
        "exact": True,
    }
    return Engine.from_pretrained(
        folder, device=device, dtype="float32", depth=depth, **{**sizes, **options}
    )


@contextmanager
def held_behind_its_first_step(engine: Engine) -> Iterator[None]:
    """Requests that are submitted in the block run together: no one ends before all are there."""
    all_there = threading.Event()
    engine.listen(lambda output: all_there.wait(60))
    try:
        yield
    finally:
        all_there.set()


def check_greedy(name: str, seed: int, folder: Path, device: str) -> None:
    """Tokens equal transformers', alone and batched, at depth 1 and 2."""
    model = saved_tiny_model(name, folder, seed)
    prompts = [prompt_of(length, VOCAB, seed) for length in LENGTHS]
    expected = [greedy_ids(model, prompt, NEW) for prompt in prompts]
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    for depth in (1, 2):
        with tiny_engine(folder, depth, device) as engine:
            batched = engine.generate(prompts, params)
            alone = [engine.generate([prompt], params)[0] for prompt in prompts]
        assert [list(output.token_ids) for output in batched] == expected
        assert [list(output.token_ids) for output in alone] == expected


def check_paging(folder: Path, device: str, **options: object) -> None:
    """Tokens do not depend on pages that come late, are shared, or are lost and made again."""
    saved_tiny_model("qwen3-6-3-24", folder)
    shared = prompt_of(14, VOCAB)
    prompts = [[*shared[: 5 * (i % 4)], *prompt_of(1 + i % 3, VOCAB, i)] for i in range(16)]
    params = [
        SamplingParams(20 + 2 * i, (0.0, 1.0)[i % 2], seed=i, ignore_eos=True) for i in range(16)
    ]
    with tiny_engine(folder, 1, device, prefix_cache=False, **options) as engine:
        expected = [output.token_ids for output in engine.generate(prompts, params)]
        assert engine.stats().preemptions == engine.stats().prefix_hit_tokens == 0
    preemptions = hits = 0
    for depth in (1, 2):
        for num_pages in (14, 20, 26):
            sizes = {"exact": num_pages == 14, "num_pages": num_pages}
            with tiny_engine(folder, depth, device, **sizes, **options) as engine:
                outputs = engine.generate(prompts, params)
                now = engine.stats()
            assert [output.token_ids for output in outputs] == expected
            preemptions, hits = preemptions + now.preemptions, hits + now.prefix_hit_tokens
    assert preemptions > 0
    assert hits > 0


def test_tokens_do_not_depend_on_pages(tmp_path: Path) -> None:
    check_paging(tmp_path, "cpu")


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", sorted(TINY))
def test_greedy_tokens_equal_transformers_alone_and_batched_at_both_depths(
    name: str, seed: int, tmp_path: Path
) -> None:
    check_greedy(name, seed, tmp_path, "cpu")


@pytest.mark.emulated
@pytest.mark.parametrize("graph", [True, False])
def test_eager_steps_and_graphs_agree(graph: bool, tmp_path: Path) -> None:
    model = saved_tiny_model("qwen3-tied", tmp_path)
    prompt = prompt_of(20, VOCAB)
    with tiny_engine(tmp_path, 2, graph=graph, prefill_buckets=(9,)) as engine:
        (output,) = engine.generate([prompt], SamplingParams(max_new_tokens=NEW, ignore_eos=True))
    assert list(output.token_ids) == greedy_ids(model, prompt, NEW)


@pytest.mark.emulated
@DEPTHS
def test_sampled_tokens_depend_on_the_seed_and_not_on_the_batch(depth: int, tmp_path: Path) -> None:
    saved_tiny_model("llama-plain", tmp_path)
    params = [
        SamplingParams(max_new_tokens=NEW, temperature=0.8, seed=seed, ignore_eos=True)
        for seed in range(5)
    ]
    prompt = prompt_of(7, VOCAB)
    with tiny_engine(tmp_path, depth) as engine:
        batched = engine.generate([prompt] * 5, params)
        alone = [engine.generate([prompt], one)[0] for one in params]
    assert [output.token_ids for output in batched] == [output.token_ids for output in alone]
    assert len({output.token_ids for output in batched}) > 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine]:
    """The same tiny model at depth 1 and 2."""
    folder = tmp_path_factory.mktemp("tiny")
    saved_tiny_model("qwen3-6-3-24", folder)
    engines = tiny_engine(folder, 1), tiny_engine(folder, 2, max_rows=3)
    yield engines
    for engine in engines:
        engine.close()


REQUEST = st.fixed_dictionaries(
    {
        "length": st.integers(1, 30),
        "count": st.integers(1, 20),
        "temperature": st.sampled_from([0.0, 1.0]),
        "stops": st.lists(st.integers(0, VOCAB - 1), max_size=8),
        "constraint": st.sampled_from(
            [None, list(range(40, 80)), [{1, 2, 3}, {4, 5}, {6, 7, 8}], [{9}, set()]]
        ),
        "cancel_after": st.one_of(st.none(), st.integers(0, 6)),
    }
)


def run(engine: Engine, requests: list[dict], cancel: bool) -> list[tuple]:
    handles = []
    for index, request in enumerate(requests):
        constraint = (
            None if request["constraint"] is None else from_allowed_ids(request["constraint"])
        )
        params = SamplingParams(
            max_new_tokens=request["count"],
            temperature=request["temperature"],
            seed=index,
            stop_token_ids=tuple(request["stops"]),
            constraint=constraint,
        )
        handles.append(engine.submit(prompt_of(request["length"], VOCAB), params))
    for handle, request in zip(handles, requests, strict=True):
        if cancel and request["cancel_after"] is not None:
            for position, event in enumerate(handle.iter()):
                if position >= request["cancel_after"] or event.finish_reason is not None:
                    break
            handle.cancel()
    outputs = [handle.result(60) for handle in handles]
    for handle in handles:
        assert sum(event.finish_reason is not None for event in handle.iter()) == 1
    return [(output.token_ids, output.finish_reason) for output in outputs]


@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(REQUEST, min_size=1, max_size=6))
def test_depth_two_equals_depth_one(pair: tuple[Engine, Engine], requests: list[dict]) -> None:
    """Stops, caps, constraints, temperatures: equal.

    A cancelled request shows a beginning of the same tokens, others all of them.
    """
    calm = run(pair[0], requests, cancel=False)
    assert run(pair[1], requests, cancel=False) == calm
    for engine in pair:
        for (tokens, reason), (full, full_reason) in zip(
            run(engine, requests, cancel=True), calm, strict=True
        ):
            if reason == "cancelled":
                assert tokens == full[: len(tokens)]
            else:
                assert (tokens, reason) == (full, full_reason)


# --- SmolLM2 --------------------------------------------------------------------------------------

TEXTS = [
    "Hi",
    "One, two, three,",
    "The sky is blue because",
    "def fibonacci(n):\n",
    "Q: What is the capital of France?\nA:",
    "Once upon a time, in a small village by the sea,",
    "E = mc",
    "1 + 1 =",
    "Die Katze",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of thermodynamics say that",
    "import torch\nimport numpy as",
    "Roses are red,",
    "She opened the door and",
    "In 1969,",
    "A recipe for bread: take flour, water, salt and",
    "To be, or not to be, that is",
    "apple, banana, cherry,",
    "This is a long prompt. " * 12,
    "The quick brown fox jumps over the lazy dog. " * 6 + "The",
]
SMOL_NEW = 8


@pytest.fixture(scope="module")
def reference(smollm2: LoadedModel) -> LlamaForCausalLM:
    """transformers' own maths over our weights; that these are the file's is shown in
    tests/models.
    """
    return reference_model("smollm2", smollm2.config, smollm2.weights)


def argmax_after(reference: LlamaForCausalLM, prompt: list[int], tokens: list[int]) -> list[int]:
    """What transformers takes greedily after the prompt, given that what came before is
    `tokens`.
    """
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + tokens[:-1]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


def check_smollm2(
    loaded: LoadedModel,
    reference: LlamaForCausalLM,
    new_tokens: int,
    alone_at: tuple[int, ...] = (1, 2),
    every: int = 1,
) -> None:
    """Batched, at depth 1 and 2, and alone, at some of these depths each prompt or every third,
    say: runs that agree, and each of their tokens is transformers' own choice.
    """
    assert loaded.tokenizer is not None
    prompts = [loaded.tokenizer.encode(text) for text in TEXTS]
    assert len(prompts) >= 20
    assert len({len(prompt) for prompt in prompts}) >= 10
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    runs = []
    for depth in (1, 2):
        options = {
            "max_rows": 8,
            "max_len": 256,
            "buckets": (1, 4, 8),
            "chunk": 64,
            "depth": depth,
            "exact": True,
        }
        with Engine.from_weights(
            loaded.config, loaded.weights, loaded.tokenizer, **options
        ) as engine:
            runs.append(engine.generate(prompts, params))
            if depth in alone_at:
                alone = [engine.generate([prompt], params)[0] for prompt in prompts[::every]]
                batched = runs[-1][::every]
                assert [one.token_ids for one in alone] == [one.token_ids for one in batched]
    for prompt, *outputs in zip(prompts, *runs, strict=True):
        (tokens,) = {output.token_ids for output in outputs}
        assert list(tokens) == argmax_after(reference, prompt, list(tokens))


@pytest.mark.slow("SmolLM2 answers twenty prompts, here and in transformers")
def test_smollm2_tokens_equal_transformers_over_twenty_prompts(
    smollm2: LoadedModel, reference: LlamaForCausalLM
) -> None:
    # alone at both depths: as test_greedy_tokens_equal_transformers_alone_and_batched, and on CUDA
    check_smollm2(smollm2, reference, SMOL_NEW, alone_at=(2,), every=7)


def test_smollm2_streams_its_chat_answer(smollm2: LoadedModel) -> None:
    with Engine.from_weights(
        smollm2.config, smollm2.weights, smollm2.tokenizer, max_rows=1, max_len=128
    ) as engine:
        request = engine.submit("What is the capital of France?", SamplingParams(max_new_tokens=24))
        streamed = "".join(event.text for event in request.iter())
        output = request.result()
    assert output.text == streamed
    assert "Paris" in output.text
    assert "<|im_end|>" not in output.text
    assert output.finish_reason == "stop"
    assert output.token_ids[-1] in smollm2.config.eos_ids
