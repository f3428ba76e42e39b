"""Bad input, each with an error that names the value and says what to do, while an engine
serves: it goes on as if nothing had happened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from photon_ext.engine import Engine, EngineOptions, Request
from photon_ext.engine.parts import EngineParts
from photon_ext.errors import ConfigError, DeviceError, ModelError, PhotonError, RequestError
from photon_ext.models.layers.block import Block
from photon_ext.models.loading.loader import load_model
from photon_ext.models.weights import DecoderWeights, empty_weights
from photon_ext.sampling import SamplingParams, from_allowed_ids
from photon_ext.weight import Weight
from tests.engine.simulated import WatchedDevice, engine_on
from tests.models.tiny import VOCAB, greedy_ids, saved_tiny_model

SIZES = {
    "device": "cpu",
    "dtype": "float32",
    "max_rows": 2,
    "max_len": 48,
    "page_size": 4,
    "buckets": (1,),
}
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    saved_tiny_model("llama-plain", path)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    return greedy_ids(saved_tiny_model("llama-plain", folder), PROMPT, 20)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(folder, **SIZES) as made:
        yield made


@pytest.fixture
def bystander(engine: Engine, expected: list[int]) -> Iterator[Request]:
    """A request that runs while something goes wrong beside it, and a request after it."""
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    request = engine.submit(PROMPT, params)
    yield request
    assert list(request.result(60).token_ids) == expected
    assert list(engine.generate([PROMPT], params)[0].token_ids) == expected


def damaged(folder: Path, tmp_path: Path, damage: Callable[[Path], None]) -> Path:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damage(tmp_path)
    return tmp_path


def truncate(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])


def make_foreign(path: Path) -> None:
    (path / "model.safetensors").write_bytes(
        b"PK\x03\x04 this is an archive of something else" * 50
    )


def make_gpt2(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    config.update(architectures=["GPT2LMHeadModel"], model_type="gpt2")
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "model.safetensors"),
        (make_foreign, "model.safetensors"),
        (lambda path: (path / "model.safetensors").unlink(), "safetensors"),
        (make_gpt2, "GPT2LMHeadModel.*supported architectures"),
        (lambda path: (path / "config.json").write_text("{"), "config.json"),
    ],
    ids=["truncated", "foreign", "no weights", "unsupported architecture", "broken config"],
)
def test_a_damaged_model_is_refused(
    folder: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        Engine.from_pretrained(damaged(folder, tmp_path, damage), **SIZES)


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"model": "/nowhere/at/all"}, ModelError, "/nowhere/at/all.*expected"),
        ({"depth": 3}, ConfigError, "depth is 3; give 1 .* or 2"),
        ({"depth": "2"}, ConfigError, "depth is '2'"),
        ({"depth": 2.0}, ConfigError, "depth is 2.0"),
        (
            {"backend": "fast"},
            ConfigError,
            "backend is 'fast'; give 'hopper', 'portable', or None for hopper where it runs",
        ),
        (
            {"backend": np.array(["hopper", "x"])},
            ConfigError,
            r"backend is array\(.*; give 'hopper'",
        ),
        ({"max_rows": 0}, ConfigError, "max_rows is 0; give an integer from 1 to 2147483647"),
        (
            {"max_rows": 10**9},
            ConfigError,
            "max_rows 1000000000, .*can be used on cpu: lower max_rows",
        ),
        (
            {"max_rows": 10**400},
            ConfigError,
            "max_rows is an integer of 1329 bits; give an integer from 1 to 2147483647",
        ),
        ({"chunk": 10**9}, ConfigError, "chunk 1000000000 .*can be used on cpu: lower chunk$"),
        (
            {"chunk": 10**400},
            ConfigError,
            "chunk is an integer of 1329 bits; give an integer from 1 to 2147483647",
        ),
        (
            {"page_size": 2**31 - 1},
            ConfigError,
            "page_size 2147483647 .*can be used on cpu: lower page_size$",
        ),
        ({"num_pages": 10**9}, ConfigError, "at least 1000000000 pages .*: lower num_pages$"),
        (
            {"num_pages": 10**12},
            ConfigError,
            "num_pages is 1000000000000; give an integer from 1 to 2147483647",
        ),
        ({"max_len": 10**5000}, ConfigError, "max_len is an integer of 16610 bits"),
        ({"depth": 10**5000}, ConfigError, "depth is an integer of 16610 bits; give 1 .* or 2"),
        (
            {"max_stop_ids": 10**5000},
            ConfigError,
            "max_stop_ids is an integer of 16610 bits; give an integer from 1 to 4096",
        ),
        (
            {"buckets": (10**5000, 1)},
            ConfigError,
            "an entry of buckets is an integer of 16610 bits; give an integer from 1 to",
        ),
        ({"max_len": 257}, ConfigError, "max_len is 257 and the model was made for 256"),
        ({"page_size": -1}, ConfigError, "page_size is -1"),
        ({"chunk": 0}, ConfigError, "chunk is 0"),
        ({"prefill": "both"}, ConfigError, "prefill is 'both'; give 'mixed', 'separate', or None"),
        ({"max_tokens_per_step": 0}, ConfigError, "max_tokens_per_step is 0; give an integer"),
        ({"buckets": (1, 0)}, ConfigError, "an entry of buckets is 0; give an integer from 1"),
        ({"dtype": "int4"}, ConfigError, "dtype is 'int4'; give one of float32"),
        (
            {"max_row": 4},
            ConfigError,
            "an engine has no option 'max_row'; did you mean max_rows.* There are model, device, "
            "dtype, quantize, vision, region, max_r",
        ),
        ({"devise": "cpu"}, ConfigError, "an engine has no option 'devise'; did you mean device"),
        (
            {"gpu_memory": 0.9},
            ConfigError,
            "an engine has no option 'gpu_memory'; there are model, .*, blocking$",
        ),
        ({"device": "tpu"}, DeviceError, "'tpu'.*use 'cpu'"),
        pytest.param(
            {"device": "cuda"},
            DeviceError,
            "'cuda' was asked for.*'cpu'",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here"),
        ),
    ],
)
def test_a_bad_setting_is_refused(
    folder: Path, options: dict, kind: type[PhotonError], message: str
) -> None:
    settings = {**SIZES, "model": folder, **options}
    with pytest.raises(kind, match=message):
        Engine.from_pretrained(settings.pop("model"), **settings)


def test_a_loaded_model_takes_no_option_that_there_is_not(folder: Path) -> None:
    loaded = load_model(folder, "float32", "cpu")
    with pytest.raises(
        ConfigError,
        match="an engine has no option 'device'; there are config, weights, tokenizer, vision, ",
    ):
        Engine.from_weights(loaded.config, loaded.weights, device="cpu")


def test_weights_of_another_dtype_are_refused(folder: Path) -> None:
    config = load_model(folder, "float32", "cpu").config
    with pytest.raises(
        ConfigError,
        match=r"the weights are torch\.float64; convert them to float32, float16 or bfloat16",
    ):
        Engine.from_weights(config, empty_weights(config, torch.float64, "cpu"))


def cut(layer: Block) -> Block:
    """Without the first output of its MLP."""
    down = layer.mlp.down
    shorter = replace(down, weights=(Weight(down.weight.data[1:]),))
    return replace(layer, mlp=replace(layer.mlp, down=shorter))


def normed(layer: Block) -> Block:
    """With a norm of q, of any size."""
    return replace(layer, attention=replace(layer.attention, q_norm=layer.attention.qkv.norm))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: replace(w, layers=w.layers[1:]),
            r"the weights have 2 layers and the config 3; give those of one model",
        ),
        (
            lambda w: replace(w, embedding=Weight(w.embedding.data.double())),
            r"embedding\.data of the weights is torch\.float64 \[\d+, \d+\] on cpu, expected",
        ),
        (
            lambda w: replace(w, head=replace(w.head, weights=(Weight(w.head.weight.data[:-1]),))),
            r"head\.weights\[0\]\.data of the weights is torch\.float32 \[\d+, \d+\] on cpu, ",
        ),
        (
            lambda w: replace(w, layers=(w.layers[0], cut(w.layers[1]), w.layers[2])),
            r"layers\[1\]\.mlp\.down\.weights\[0\]\.data of the weights is .*, expected .*, by the "
            r"config and the embedding",
        ),
        (
            lambda w: replace(w, layers=(normed(w.layers[0]), *w.layers[1:])),
            r"layers\[0\]\.attention\.q_norm .*, expected None",
        ),
        (
            lambda w: replace(w, head=replace(w.head, norm=w.head.norm.to("meta"))),
            r"head\.norm of the weights is .* on meta, expected .* on cpu",
        ),
    ],
)
def test_weights_that_do_not_fit_the_config_are_named(
    folder: Path, change: Callable[[DecoderWeights], DecoderWeights], message: str
) -> None:
    loaded = load_model(folder, "float32", "cpu")
    with pytest.raises(ConfigError, match=message):
        Engine.from_weights(loaded.config, change(loaded.weights))


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1] * 49, {}, "the prompt has 49 tokens and the context holds 48"),
        ([1, VOCAB], {}, f"the prompt holds {VOCAB}; token ids of this model are 0 to {VOCAB - 1}"),
        ([-1], {}, "the prompt holds -1; token ids"),
        ([10**5000], {}, "the prompt holds an integer of 16610 bits; token ids of this model"),
        (
            [(10**5000,)],
            {},
            r"the prompt holds a tuple \(whose text cannot be made\), which is no token id",
        ),
        ([{"text": 10**5000}], {}, r"the chat holds a dict \(whose text cannot be made\)"),
        ("text", {}, "no tokenizer; give the prompt as a list of token ids"),
        (PROMPT, {"max_new_tokens": 0}, "max_new_tokens is 0; give an integer from 1 to"),
        (PROMPT, {"max_new_tokens": -4}, "max_new_tokens is -4"),
        (PROMPT, {"temperature": -1.0}, "temperature is -1.0; give 0"),
        (PROMPT, {"temperature": math.nan}, "temperature is nan; give 0"),
        (PROMPT, {"temperature": 10**400}, "temperature is an integer of 1329 bits; give 0"),
        (PROMPT, {"seed": 10**5000}, "seed is an integer of 16610 bits; give an integer from 0"),
        (
            PROMPT,
            {"max_new_tokens": -(10**5000)},
            "max_new_tokens is a negative integer of 16610 bits",
        ),
        (PROMPT, {"stop_token_ids": (10**5000,)}, "stop_token_ids holds an integer of 16610 bits"),
        (PROMPT, {"stop": "x"}, "no tokenizer; use stop_token_ids"),
        (PROMPT, {"stop_token_ids": (VOCAB,)}, f"stop_token_ids holds {VOCAB}"),
    ],
)
def test_a_bad_request_is_refused(
    engine: Engine, prompt: object, params: dict, message: str
) -> None:
    with pytest.raises((RequestError, ConfigError), match=message):
        engine.generate([PROMPT, prompt], SamplingParams(**params))


@pytest.mark.parametrize(
    ("constraint", "error"),
    [
        (None, "position 3: all of its logits are NaN or -inf; look at the weights"),
        (
            from_allowed_ids(range(VOCAB)),
            "position 3: the constraint allows nothing there, or, less likely, all logits that it "
            "allows",
        ),
    ],
    ids=["plain", "constrained"],
)
def test_logits_that_are_no_numbers_end_the_request(
    folder: Path, constraint: object, error: str
) -> None:
    loaded = load_model(folder, "float32", "cpu")
    loaded.weights.head.norm[:] = math.nan
    sizes = {name: value for name, value in SIZES.items() if name not in ("device", "dtype")}
    with Engine.from_weights(loaded.config, loaded.weights, **sizes) as broken:
        output = broken.submit(PROMPT, SamplingParams(constraint=constraint)).result(60)
    assert output.finish_reason == "error"
    assert error in (output.error or "")
    assert ("constraint" in (output.error or "")) == (constraint is not None)


def test_more_requests_than_rows_wait_their_turn(engine: Engine, expected: list[int]) -> None:
    outputs = engine.generate([PROMPT] * 9, SamplingParams(max_new_tokens=20, ignore_eos=True))
    assert [list(output.token_ids) for output in outputs] == [expected] * 9


def test_raw_is_true_or_false(engine: Engine, bystander: Request) -> None:
    with pytest.raises(ConfigError, match="raw is 'no'; give True or False"):
        engine.submit(PROMPT, raw="no")  # type: ignore[arg-type]


def test_what_is_called_before_a_request_is_queued_is_a_function(
    engine: Engine, bystander: Request
) -> None:
    with pytest.raises(ConfigError, match="announce is 5; give a function, or None"):
        engine.submit(PROMPT, announce=5)  # type: ignore[call-overload]


@pytest.mark.parametrize("parts", ["smollm2", None])
def test_an_engine_is_made_of_parts(parts: object) -> None:
    with pytest.raises(ConfigError, match=r"parts is .*; give EngineParts, or .*from_pretrained"):
        Engine(parts)  # type: ignore[arg-type]


def test_an_engines_options_are_options() -> None:
    parts = object.__new__(EngineParts)
    with pytest.raises(ConfigError, match=r"options is .*; give EngineOptions"):
        Engine(parts, {"max_rows": 2})  # type: ignore[arg-type]


def test_sizes_may_be_numpys_numbers_and_are_plain_ones_from_then_on() -> None:
    chunk = np.array(9)  # an array changes in place where something is taken from it
    sizes = {"page_size": np.uint8(16), "chunk": chunk, "max_tokens_per_step": np.array(7)}
    options = EngineOptions(max_rows=np.int8(100), max_waiting=np.int8(100), **sizes)  # type: ignore[arg-type]
    for name in ("max_rows", "max_waiting", "max_stop_ids", "depth", *sizes):
        assert type(getattr(options, name)) is int, name
    with engine_on(WatchedDevice(), chunk=chunk, prefill="mixed") as engine:
        for _ in range(3):
            outputs = engine.generate([[1] * 20, [2] * 3], SamplingParams(max_new_tokens=4))
            assert [output.finish_reason for output in outputs] == ["length"] * 2
    assert chunk == 9


def test_a_way_to_prefill_is_refused_though_it_compares_as_an_array() -> None:
    with pytest.raises(ConfigError, match=r"^prefill is .*; give 'mixed', 'separate', or None"):
        EngineOptions(prefill=np.array(["mixed", "separate"]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_new_tokens", r"one of SamplingParams: give params=SamplingParams\(max_new_tokens="),
        ("priorities", "there are priority, timeout_s, deadline, cache_salt"),
    ],
)
def test_an_option_that_a_request_has_not_is_refused_with_a_hint(
    engine: Engine, bystander: Request, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"a request has no option '{name}'; .*{message}"):
        engine.submit(PROMPT, **{name: 5})  # type: ignore[arg-type]
