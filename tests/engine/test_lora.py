"""Adapters in an engine: the tokens of merged weights, whoever shares the steps, and whatever is
loaded, unloaded or refused meanwhile.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from photon_ext.engine import Engine
from photon_ext.errors import ConfigError, ModelError, RequestError
from photon_ext.sampling import SamplingParams
from tests.engine.test_engine_fast import CONFIG, DEVICES, engine_on
from tests.engine.test_engine_models import held_behind_its_first_step, prompt_of, tiny_engine
from tests.models.adapters import ALL, adapter_tensors, merged, saved_adapter
from tests.models.tiny import VOCAB, greedy_ids, saved_tiny_model

NEW = 8
PARAMS = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
PROMPTS = [prompt_of(length, VOCAB) for length in (3, 12, 20)]


class Adapted(NamedTuple):
    """A tiny model, its directory, and adapters with what transformers answers to PROMPTS."""

    model: PreTrainedModel
    folder: Path
    paths: dict[str, Path]
    expected: dict[str | None, list[list[int]]]


def adapted(folder: Path, name: str, ranks: dict[str, tuple[int, tuple[str, ...]]]) -> Adapted:
    model = saved_tiny_model(name, folder / "model")
    paths, models = {}, {None: model}
    for seed, (adapter, (rank, modules)) in enumerate(ranks.items()):
        tensors = adapter_tensors(model, rank, seed, modules)
        rslora = {"use_rslora": True} if seed % 2 else {}
        paths[adapter] = saved_adapter(folder / adapter, tensors, rank, **rslora)
        models[adapter] = merged(model, paths[adapter], tensors)
    expected = {
        adapter: [greedy_ids(one, prompt, NEW) for prompt in PROMPTS]
        for adapter, one in models.items()
    }
    return Adapted(model, folder / "model", paths, expected)


class Held:
    """A constraint that allows everything, once it is let go on."""

    finished = False

    def __init__(self) -> None:
        self.runs, self.goes_on = threading.Event(), threading.Event()

    def fill_bitmask(self, words: memoryview) -> None:
        self.runs.set()
        assert self.goes_on.wait(60)
        words[:] = memoryview(array("i", [-1] * len(words)))

    def advance(self, token: int) -> None:
        pass


RANKS = {"all": (4, ALL), "some": (3, ("q_proj", "v_proj", "down_proj")), "wide": (16, ALL)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return adapted(tmp_path_factory.mktemp("lora"), "qwen3-tied", RANKS)


def engine_of(tiny: Adapted, slots: int = 3, depth: int = 2, **options: Any) -> Engine:
    engine = tiny_engine(tiny.folder, depth, lora_slots=slots, **options)
    for name, path in tiny.paths.items():
        engine.load_lora(name, path)
    return engine


@pytest.fixture
def engine(tiny: Adapted) -> Iterator[Engine]:
    with engine_of(tiny) as made:
        yield made


def ask(engine: Engine, tiny: Adapted, names: list[str | None]) -> None:
    """Each name with each prompt, at once; every answer is that of the merged model."""
    asked = [(name, index) for index in range(len(PROMPTS)) for name in names]
    requests = [engine.submit(PROMPTS[index], PARAMS, lora=name) for name, index in asked]
    for (name, index), request in zip(asked, requests, strict=True):
        assert list(request.result().token_ids) == tiny.expected[name][index], (name, index)


@pytest.mark.parametrize("name", ["llama-plain", "llama-biased-linear", "qwen3-6-3-24"])
def test_the_tokens_are_those_of_merged_weights(tmp_path: Path, name: str) -> None:
    tiny = adapted(tmp_path, name, {"one": (5, ALL)})
    assert tiny.expected["one"] != tiny.expected[None]
    with engine_of(tiny, 1) as engine:
        ask(engine, tiny, ["one", None])


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("options", [{}, {"backend": "hopper"}, {"prefill": "mixed"}])
def test_a_batch_mixes_adapters(tiny: Adapted, depth: int, options: dict[str, Any]) -> None:
    """Rows with three adapters and without: each has the tokens of its own single run."""
    with engine_of(tiny, depth=depth, max_rows=6, **options) as engine:
        ask(engine, tiny, ["all", None, "some", "wide"])
        ask(engine, tiny, ["wide", "all"])


def test_adapters_take_turns_in_fewer_slots(tiny: Adapted) -> None:
    for slots in (1, 2):
        with engine_of(tiny, slots) as engine:
            ask(engine, tiny, ["all", None, "some", "wide", "all"])


def test_who_waits_for_a_slot_is_overtaken_by_who_needs_none(tiny: Adapted) -> None:
    long = SamplingParams(max_new_tokens=40, ignore_eos=True)
    with engine_of(tiny, 1) as engine:
        first = engine.submit(PROMPTS[0], long, lora="all")
        waits = engine.submit(PROMPTS[0], PARAMS, lora="some")
        plain = engine.submit(PROMPTS[0], PARAMS)
        assert list(plain.result().token_ids) == tiny.expected[None][0]
        assert list(waits.result().token_ids) == tiny.expected["some"][0]
        assert first.done


@pytest.mark.parametrize("exact", [False, True])
def test_a_preempted_request_keeps_its_adapter(tiny: Adapted, exact: bool) -> None:
    """Fewer pages than all need at once, and fewer slots than adapters."""
    long = SamplingParams(max_new_tokens=40, ignore_eos=True)
    names = ("all", "some", None, "wide")

    def answers(slots: int, **options: int) -> list[list[int]]:
        with engine_of(tiny, slots, exact=exact, **options) as engine:
            with held_behind_its_first_step(engine):
                requests = [engine.submit(PROMPTS[1], long, lora=name) for name in names]
            found = [list(request.result().token_ids) for request in requests]
            assert (engine.stats().preemptions > 0) == bool(options)
        return found

    undisturbed = answers(3)
    assert [tokens[:NEW] for tokens in undisturbed] == [tiny.expected[name][1] for name in names]
    assert answers(2, num_pages=16) == undisturbed


def test_cached_pages_are_those_of_the_same_adapter(engine: Engine, tiny: Adapted) -> None:
    def cached(name: str | None) -> int:
        output = engine.generate([PROMPTS[2]], PARAMS, lora=name)[0]
        assert list(output.token_ids) == tiny.expected[name][2]
        return output.cached_tokens

    assert [cached(None), cached("all"), cached("some")] == [0, 0, 0]
    assert min(cached(None), cached("all"), cached("some")) > 0


def test_an_adapter_of_the_same_name_finds_no_pages_of_the_last(tiny: Adapted) -> None:
    with tiny_engine(tiny.folder, 2, lora_slots=1) as engine:
        for name in ("all", "wide"):
            engine.load_lora("x", tiny.paths[name])
            output = engine.generate([PROMPTS[2]], PARAMS, lora="x")[0]
            assert list(output.token_ids) == tiny.expected[name][2]
            assert output.cached_tokens == 0
            engine.unload_lora("x")


def test_adapters_are_loaded_and_unloaded_while_the_engine_serves(tiny: Adapted) -> None:
    long = SamplingParams(max_new_tokens=40, ignore_eos=True)
    with tiny_engine(tiny.folder, 2, lora_slots=2) as engine:
        running = engine.submit(PROMPTS[1], long)
        for _ in range(3):
            for name in ("all", "some", "wide"):
                engine.load_lora(name, tiny.paths[name])
                ask(engine, tiny, [name])
                engine.unload_lora(name)
        assert list(running.result().token_ids[:NEW]) == tiny.expected[None][1]


def test_an_adapter_in_use_is_not_unloaded(engine: Engine, tiny: Adapted) -> None:
    held = Held()
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, constraint=held)
    request = engine.submit(PROMPTS[0], params, lora="all")
    assert held.runs.wait(60)
    with pytest.raises(ConfigError, match="the adapter 'all' is in use by 1 requests"):
        engine.unload_lora("all")
    held.goes_on.set()
    assert list(request.result().token_ids) == tiny.expected["all"][0]
    ask(engine, tiny, ["all"])
    engine.unload_lora("all")
    with pytest.raises(
        RequestError, match="lora is 'all', and no adapter has it; there are 'some'"
    ):
        engine.submit(PROMPTS[0], PARAMS, lora="all")


def test_bad_names_are_refused_and_nobody_else_is_hurt(engine: Engine, tiny: Adapted) -> None:
    running = engine.submit(PROMPTS[1], PARAMS, lora="all")
    with pytest.raises(RequestError, match="lora is 'none', and no adapter has it"):
        engine.submit(PROMPTS[0], PARAMS, lora="none")
    with pytest.raises(ConfigError, match="lora is 3; give the name of an adapter"):
        engine.submit(PROMPTS[0], PARAMS, lora=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no adapter is named 'none'"):
        engine.unload_lora("none")
    with pytest.raises(ConfigError, match=r"no adapter is named \['all'\]; there are 'all'"):
        engine.unload_lora(["all"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="an adapter is named 'all' already; unload it first"):
        engine.load_lora("all", tiny.paths["all"])
    with pytest.raises(ConfigError, match="the adapter's name is ''; give a text"):
        engine.load_lora("", tiny.paths["all"])
    with pytest.raises(ModelError, match="is no directory of a PEFT adapter"):
        engine.load_lora("model", tiny.folder)
    assert list(running.result().token_ids) == tiny.expected["all"][1]


def test_without_slots_an_adapter_is_refused(tiny: Adapted) -> None:
    with tiny_engine(tiny.folder, 2) as engine:
        with pytest.raises(ConfigError, match=r"no slots for adapters; make it with lora_slots=1"):
            engine.load_lora("all", tiny.paths["all"])
        with pytest.raises(RequestError, match="none is loaded"):
            engine.submit(PROMPTS[0], PARAMS, lora="all")


def test_a_rank_beyond_the_slots_is_refused(tiny: Adapted) -> None:
    with tiny_engine(tiny.folder, 2, lora_slots=1, lora_rank=8) as engine:
        with pytest.raises(ModelError, match="r is 16, and the engine's slots hold ranks up to 8"):
            engine.load_lora("wide", tiny.paths["wide"])
        engine.load_lora("all", tiny.paths["all"])
        ask(engine, tiny, ["all", None])


@pytest.mark.gpu
def test_on_a_gpu_the_tokens_are_those_of_merged_weights(tiny: Adapted) -> None:
    torch.cuda.init()
    with tiny_engine(tiny.folder, 2, "cuda", lora_slots=2, max_rows=6) as engine:
        for name, path in tiny.paths.items():
            engine.load_lora(name, path)
        ask(engine, tiny, ["all", None, "some", "wide"])


@pytest.mark.parametrize("device", DEVICES)
def test_with_the_hopper_kernels_tokens_are_the_same_alone_and_among_other_adapters(
    tmp_path: Path, device: str
) -> None:
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=CONFIG.vocab,
            hidden_size=CONFIG.hidden,
            num_hidden_layers=CONFIG.layers,
            num_attention_heads=CONFIG.q_heads,
            num_key_value_heads=CONFIG.kv_heads,
            head_dim=CONFIG.head_dim,
            intermediate_size=CONFIG.intermediate,
        )
    )
    names = [None, "a", "b", "a", None, "b"]
    prompts = [prompt_of(length, CONFIG.vocab) for length in (1, 33, 33, 70, 33, 9)]
    runs = []
    for depth in (1, 2):
        with engine_on(device, depth, lora_slots=2, lora_rank=8) as engine:
            for seed, name in enumerate("ab"):
                tensors = adapter_tensors(model, 5 + seed, seed)
                engine.load_lora(
                    name, saved_adapter(tmp_path / f"{name}{depth}", tensors, 5 + seed)
                )
            asked = list(zip(prompts, names, strict=True))
            together = [engine.submit(prompt, PARAMS, lora=name) for prompt, name in asked]
            runs.append([request.result().token_ids for request in together])
            runs.append([engine.submit(p, PARAMS, lora=n).result().token_ids for p, n in asked])
    assert all(tokens == runs[0] for tokens in runs)
    assert len({runs[0][index] for index in (1, 2, 4)}) == 3  # the same prompt
