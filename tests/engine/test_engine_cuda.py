"""The engine on a GPU: transformers' tokens in float32 with the plain kernels, bf16 by
tolerance, depth 2 equal to depth 1.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from photon_ext.engine import Engine
from photon_ext.models.loading.loader import load_model
from photon_ext.sampling import SamplingParams, from_allowed_ids
from tests.engine.test_embeds import check_embeds, check_embeds_under_pressure
from tests.engine.test_engine_models import (
    NEW,
    REQUEST,
    check_greedy,
    check_paging,
    check_smollm2,
    prompt_of,
    reference,  # noqa: F401 - a fixture of the CPU tests: transformers over our weights
    run,
    tiny_engine,
)
from tests.engine.test_spatial import check_spatial
from tests.models.harness import Chunk, Harness
from tests.models.tiny import TINY, VOCAB, greedy_ids, saved_tiny_model

pytestmark = pytest.mark.gpu

SMOL_NEW = 24


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", sorted(TINY))
def test_greedy_tokens_equal_transformers(name: str, seed: int, tmp_path: Path) -> None:
    check_greedy(name, seed, tmp_path, "cuda")


def test_tokens_do_not_depend_on_pages(tmp_path: Path) -> None:
    check_paging(tmp_path, "cuda")


@pytest.mark.parametrize("name", sorted(TINY))
def test_tokens_equal_transformers_with_embeddings(name: str, tmp_path: Path) -> None:
    check_embeds(name, tmp_path, "cuda")


@pytest.mark.parametrize("name", sorted(TINY))
def test_objects_equal_plain_pytorch_beside_text(name: str, tmp_path: Path) -> None:
    check_spatial(name, tmp_path, "cuda")


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_i15_preempted_requests_with_embeddings_give_the_tokens_of_an_undisturbed_run(
    exact: bool, depth: int, tmp_path: Path
) -> None:
    saved_tiny_model("llama-plain", tmp_path)
    check_embeds_under_pressure(tmp_path, depth, exact, "cuda")


@pytest.mark.parametrize("prefill_buckets", [(), (4, 9)])
@pytest.mark.parametrize("graph", [True, False])
def test_graphs_and_eager_steps_agree(
    graph: bool, prefill_buckets: tuple[int, ...], tmp_path: Path
) -> None:
    model = saved_tiny_model("qwen3-tied", tmp_path)
    prompt = prompt_of(20, VOCAB)
    with tiny_engine(tmp_path, 2, "cuda", graph=graph, prefill_buckets=prefill_buckets) as engine:
        (output,) = engine.generate([prompt], SamplingParams(max_new_tokens=NEW, ignore_eos=True))
    assert list(output.token_ids) == greedy_ids(model, prompt, NEW)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine]:
    folder = tmp_path_factory.mktemp("tiny")
    saved_tiny_model("qwen3-6-3-24", folder)
    engines = tiny_engine(folder, 1, "cuda"), tiny_engine(folder, 2, "cuda", max_rows=3)
    yield engines
    for engine in engines:
        engine.close()


@settings(
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(REQUEST, min_size=1, max_size=6))
def test_depth_two_equals_depth_one(pair: tuple[Engine, Engine], requests: list[dict]) -> None:
    calm = run(pair[0], requests, cancel=False)
    assert run(pair[1], requests, cancel=False) == calm
    for (tokens, reason), (full, full_reason) in zip(
        run(pair[1], requests, cancel=True), calm, strict=True
    ):
        assert tokens == full[: len(tokens)]
        assert reason in ("cancelled", full_reason)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama-6-2-24-tied", "qwen3-6-3-24"])
def test_half_precision_is_as_near_to_float32_as_transformers(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = saved_tiny_model(name, tmp_path)
    config, weights, _ = load_model(tmp_path, dtype, torch.device("cuda"))
    harness = Harness(config, weights)
    texts = [prompt_of(length, VOCAB) for length in (33, 20, 9, 5)]

    def last_logits(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids], device=model.device)).logits[0, -1].float()

    model.cuda()
    exact = torch.stack([last_logits(ids) for ids in texts])
    model.to(dtype)
    rounded = torch.stack([last_logits(ids) for ids in texts])
    ours = torch.cat([harness.prefill([Chunk(1, 0, ids)]) for ids in texts]).float()
    assert (ours - exact).norm() < 1.5 * (rounded - exact).norm()


def test_smollm2_tokens_equal_transformers(reference: LlamaForCausalLM) -> None:  # noqa: F811
    loaded = load_model("smollm2", torch.float32, torch.device("cuda"))
    check_smollm2(loaded, reference, SMOL_NEW)


def test_hazard_34_a_blocked_default_stream_delays_nothing(tmp_path: Path) -> None:
    """Captured and eager steps, prefill through torch's GEMM, and late sampling: none of it may
    wait for the default stream.
    """
    saved_tiny_model("qwen3-tied", tmp_path)
    options = {"exact": False, "chunk": 64, "max_len": 128}
    constrained = SamplingParams(
        max_new_tokens=NEW, ignore_eos=True, constraint=from_allowed_ids(list(range(VOCAB)))
    )
    with tiny_engine(tmp_path, 2, "cuda", **options) as engine:
        prompts = [prompt_of(60, VOCAB), prompt_of(3, VOCAB)]
        expected = engine.generate(prompts, SamplingParams(max_new_tokens=NEW, ignore_eos=True))
        torch.cuda._sleep(4_000_000_000)  # about two seconds
        still_blocked = torch.cuda.Event()
        still_blocked.record(torch.cuda.default_stream())
        outputs = [
            *engine.generate(prompts, SamplingParams(max_new_tokens=NEW, ignore_eos=True)),
            *engine.generate(prompts, constrained),
        ]
        assert not still_blocked.query()
    torch.cuda.synchronize()
    assert [output.token_ids for output in outputs] == 2 * [output.token_ids for output in expected]
