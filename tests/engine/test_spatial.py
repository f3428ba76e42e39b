"""Points, boxes and outlines over real decoders: the values are those of plain PyTorch with the
same weights, whatever rides beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from photon_ext.checks import Limits
from photon_ext.engine import Engine
from photon_ext.errors import ConfigError, RequestError
from photon_ext.models.loading.loader import load_model
from photon_ext.models.region import RegionConfig, RegionHeads
from photon_ext.models.vision import VisionConfig, VisionEncoder
from photon_ext.row_params import RowParams
from photon_ext.runtime.admission import check_admission
from photon_ext.sampling import SamplingParams
from photon_ext.sampling.constraints import from_callable
from photon_ext.sampling.spatial import Box, ObjectReader, Point, Skill
from tests.engine.byte_tokenizer import byte_tokenizer
from tests.engine.test_embeds import greedy, hidden_of, image_of, in_place
from tests.engine.test_engine_models import held_behind_its_first_step, prompt_of, tiny_engine
from tests.models.regions import BINS, random_heads, spatial_tokens
from tests.models.tiny import TINY, VOCAB, saved_tiny_model

VALUES = {"point": 2, "detect": 3, "segment": 2}
FREE = SamplingParams(ignore_eos=True, max_new_tokens=10)


def parts_of(model: PreTrainedModel, seed: int = 0, size: int = 9) -> list[Any]:
    return [image_of(hidden_of(model), size, seed), prompt_of(4, VOCAB, seed)]


def expected(
    model: PreTrainedModel, heads: RegionHeads, parts: list[Any], skill: str, most: int = 3
) -> tuple[int, ...]:
    return tuple(spatial_tokens(model, heads, in_place(model, parts), VALUES[skill], most)[0])


def check_spatial(name: str, folder: Path, device: str) -> None:
    """Objects equal plain PyTorch's, beside text, at depth 1 and 2."""
    model = saved_tiny_model(name, folder)
    heads = random_heads(hidden_of(model))
    asked = [(parts_of(model, seed), skill) for seed, skill in enumerate(VALUES)]
    text = greedy(model, [prompt_of(7, VOCAB)])
    for depth in (1, 2):
        with tiny_engine(folder, depth, device, embeds_tokens=40, region=heads) as engine:
            plain = engine.submit(prompt_of(7, VOCAB), FREE)
            requests = [
                engine.submit({"prompt_embeds": parts}, FREE, skill=skill, max_objects=3)
                for parts, skill in asked
            ]
            for request, (parts, skill) in zip(requests, asked, strict=True):
                output = request.result(60)
                assert output.token_ids == expected(model, heads, parts, skill), (depth, skill)
                assert (output.finish_reason, output.text) == ("length", "")
                assert output.stop_reason == "max_objects"
                assert len(output.objects) == 3
            assert list(plain.result(60).token_ids) == text


@pytest.mark.parametrize("name", sorted(TINY))
def test_objects_equal_plain_pytorch_beside_text_at_both_depths(name: str, tmp_path: Path) -> None:
    check_spatial(name, tmp_path, "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return saved_tiny_model("llama-plain", folder), folder


@pytest.fixture(scope="module")
def heads() -> RegionHeads:
    return random_heads(64)


@pytest.fixture(scope="module")
def engine(model: tuple[PreTrainedModel, Path], heads: RegionHeads) -> Iterator[Engine]:
    with tiny_engine(model[1], 2, embeds_tokens=30, region=heads) as made:
        yield made


@pytest.mark.parametrize("skill", ["point", "detect"])
def test_a_stop_token_ends_the_answer_only_where_an_object_would_begin(
    skill: str, model: tuple[PreTrainedModel, Path], heads: RegionHeads, engine: Engine
) -> None:
    parts = parts_of(model[0], 5)
    embeds = in_place(model[0], parts)
    _, said = spatial_tokens(model[0], heads, embeds, VALUES[skill], 4)
    for stop in dict.fromkeys(said):
        tokens, _ = spatial_tokens(model[0], heads, embeds, VALUES[skill], 4, {stop})
        params = SamplingParams(ignore_eos=True, stop_token_ids=(stop,))
        locate = engine.point if skill == "point" else engine.detect
        output = locate(parts[0], parts[1], max_objects=4, params=params)
        assert output.token_ids == tuple(tokens)
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert len(output.objects) == said.index(stop)


def test_temperature_says_how_many_objects_and_never_which(
    model: tuple[PreTrainedModel, Path], heads: RegionHeads, engine: Engine
) -> None:
    parts = parts_of(model[0], 7)
    every = expected(model[0], heads, parts, "detect", 12)
    stops = tuple(range(0, VOCAB, 9))
    counts = set()
    prompt = {"prompt_embeds": parts}
    asked = [
        SamplingParams(temperature=2.0, seed=seed, ignore_eos=True, stop_token_ids=stops)
        for seed in range(8)
    ]
    outputs = engine.generate([prompt] * 8, asked, skill="detect", max_objects=12)
    for params, output in zip(asked, outputs, strict=True):
        objects = 3 * len(output.objects)
        assert output.token_ids[:objects] == every[:objects]
        if output.finish_reason == "stop":
            assert output.token_ids[objects:] == (output.stop_reason,)
        counts.add(len(output.objects))
        alone = engine.detect(*parts, params, max_objects=12)
        assert alone.token_ids == output.token_ids
    assert len(counts) > 2


def test_steps_run_ahead_and_none_splits(
    model: tuple[PreTrainedModel, Path], heads: RegionHeads
) -> None:
    with tiny_engine(model[1], 2, embeds_tokens=30, region=heads) as engine:
        engine.detect(*parts_of(model[0]), max_objects=10, params=FREE)
        stats = engine.stats()
    assert stats.split_steps == 0
    assert stats.quiet_steps >= 20  # the host sends nothing: what follows is known on the device


@pytest.mark.parametrize("exact", [True, False])
def test_i15_preempted_answers_go_on_from_their_committed_values(
    exact: bool, model: tuple[PreTrainedModel, Path], heads: RegionHeads
) -> None:
    asked = [(parts_of(model[0], seed, 6), skill) for seed, skill in enumerate(VALUES)]
    with tiny_engine(
        model[1], 2, embeds_tokens=30, region=heads, num_pages=13, exact=exact
    ) as engine:
        with held_behind_its_first_step(engine):
            requests = [
                engine.submit({"prompt_embeds": parts}, FREE, skill=skill, max_objects=9)
                for parts, skill in asked
            ]
        outputs = [request.result(60) for request in requests]
        assert engine.stats().preemptions > 0
    for output, (parts, skill) in zip(outputs, asked, strict=True):
        assert output.token_ids == expected(model[0], heads, parts, skill, 9)


def test_a_cancelled_answer_keeps_its_objects_and_leaves_others_alone(
    model: tuple[PreTrainedModel, Path], heads: RegionHeads, engine: Engine
) -> None:
    parts, other = parts_of(model[0], 1), parts_of(model[0], 2)
    request = engine.submit({"prompt_embeds": parts}, FREE, skill="point", max_objects=20)
    beside = engine.submit({"prompt_embeds": other}, FREE, skill="detect", max_objects=3)
    next(request.iter())
    request.cancel()
    output = request.result(60)
    assert (
        output.token_ids == expected(model[0], heads, parts, "point", 20)[: len(output.token_ids)]
    )
    assert len(output.objects) == len(output.token_ids) // 2
    assert beside.result(60).token_ids == expected(model[0], heads, other, "detect")


def test_an_answer_that_the_context_cuts_has_its_whole_objects(
    model: tuple[PreTrainedModel, Path], heads: RegionHeads, engine: Engine
) -> None:
    parts = parts_of(model[0], 6)
    first = engine.detect(*parts, params=FREE)
    assert (first.finish_reason, first.stop_reason) == ("length", "max_len")
    assert first.token_ids == expected(model[0], heads, parts, "detect", 20)[: len(first.token_ids)]
    assert len(first.token_ids) % 3 > 0
    assert len(first.objects) == len(first.token_ids) // 3
    again = engine.detect(*parts, params=FREE)
    assert again.token_ids == first.token_ids
    few = engine.detect(*parts, params=FREE, max_objects=2)
    assert (few.finish_reason, few.stop_reason) == ("length", "max_objects")
    assert again.cached_tokens > 0  # pages of the prompt are shared


def test_graphs_and_eager_steps_give_the_same_objects(
    model: tuple[PreTrainedModel, Path], heads: RegionHeads
) -> None:
    parts = parts_of(model[0], 3)
    for graph in (True, False):
        options = {"graph": graph, "prefill": "mixed", "embeds_tokens": 30}
        with tiny_engine(model[1], 2, region=heads, **options) as engine:
            text = engine.submit(prompt_of(30, VOCAB), FREE)
            found = engine.point(*parts, max_objects=3, params=FREE)
            assert found.token_ids == expected(model[0], heads, parts, "point")
            assert list(text.result(60).token_ids) == greedy(model[0], [prompt_of(30, VOCAB)])


def test_objects_ride_beside_a_host_constraint(
    model: tuple[PreTrainedModel, Path], heads: RegionHeads, engine: Engine
) -> None:
    parts = parts_of(model[0], 4)
    only = from_callable(lambda tokens: [7])
    held = engine.submit(
        prompt_of(5, VOCAB), SamplingParams(max_new_tokens=9, ignore_eos=True, constraint=only)
    )
    found = engine.detect(*parts, max_objects=3, params=FREE)
    assert found.token_ids == expected(model[0], heads, parts, "detect")
    assert held.result(60).token_ids == (7,) * 9


def test_objects_are_read_from_values_and_boxes_end_at_the_edges() -> None:
    reader = ObjectReader.of(Skill("point", 5), 100, 10)
    assert reader is not None
    assert reader.read([105, 109, 100, 101, 102]) == (Point(0.5, 0.9), Point(0.0, 0.1))
    assert reader.read([105, 109, 7]) == (Point(0.5, 0.9),)
    boxes = ObjectReader(Skill("detect", 5), 100, 10)
    whole = 100 + 10 + 9 * 10 + 9  # as wide and high as the image
    assert boxes.read([105, 100, whole, 101]) == (Box(0.0, 0.0, 1.0, 0.5),)


def test_a_picture_and_a_text_make_the_prompt(
    model: tuple[PreTrainedModel, Path], heads: RegionHeads, tmp_path: Path
) -> None:
    config = VisionConfig(64, 16, 1, 2, 16, 16, crop_size=8, patch=4, margin=0, most_tiles=2)
    torch.manual_seed(0)
    vision = VisionEncoder(config)
    loaded = load_model(model[1], torch.float32, torch.device("cpu"))
    image = np.random.default_rng(0).integers(0, 255, (12, 20, 3), dtype=np.uint8)
    prompts = {"point": "{}!", "detect": "", "segment": ""}
    own = RegionHeads(RegionConfig(64, BINS, 8, 12, prompts))
    own.load_state_dict(heads.state_dict())
    sizes = {"max_rows": 2, "max_len": 64, "embeds_tokens": 8, "exact": True}
    with Engine.from_weights(
        loaded.config, loaded.weights, byte_tokenizer(), vision, own, **sizes
    ) as engine:
        found = engine.point(image, "AB", max_objects=2, params=FREE)
        text = byte_tokenizer().encode("AB!")
        parts = [engine.encode_image(image), text]
        with pytest.raises(RequestError, match=r"shape \(0, 5, 3\)"):
            engine.point(np.zeros((0, 5, 3), np.uint8), "AB")
        with pytest.raises(RequestError, match=r"an array of float64 of shape \(5, 5, 3\); give a"):
            engine.point(np.zeros((5, 5, 3)), "AB")
        with pytest.raises(RequestError, match="bad_words holds texts of several tokens, and the"):
            engine.point(image, "AB", SamplingParams(bad_words="xy"))
    assert found.token_ids == expected(model[0], heads, parts, "point", 2)


def test_wrong_calls_say_what_is_wrong(
    model: tuple[PreTrainedModel, Path], heads: RegionHeads, engine: Engine
) -> None:
    prompt = prompt_of(4, VOCAB)
    for options, text in (
        ({"skill": "draw"}, "skill is 'draw'; give one of 'point', 'detect', 'segment'"),
        ({"skill": 3}, "skill is 3; give one of"),
        ({"skill": "point", "max_objects": 0}, "max_objects is 0; give an integer from 1"),
        ({"max_objects": 3}, "max_objects is given without a skill"),
    ):
        with pytest.raises(ConfigError, match=text):
            engine.submit(prompt, **options)  # type: ignore[call-overload]
    for params, name in (
        (SamplingParams(stop="x"), "stop"),
        (SamplingParams(logprobs=1), "logprobs"),
        (SamplingParams(choice=("a",)), "constraint"),
    ):
        with pytest.raises(ConfigError, match=f"skill is 'point', and {name} is of text"):
            engine.submit(prompt, params, skill="point")
    image = image_of(64, 3)
    for options, text in (
        (
            {"n": 2},
            "a request has no option 'n'; it is a keyword of Engine.generate, submit and chat",
        ),
        ({"raw": True}, "a request has no option 'raw'; there are"),
        ({"skill": "detect"}, r"skill is 'detect', and this is point\(\); leave it out"),
    ):
        with pytest.raises(ConfigError, match=text):
            engine.point(image, prompt, **options)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="token id"):
        engine.submit([VOCAB + 3], skill="point")
    with tiny_engine(model[1], 2) as plain:
        with pytest.raises(RequestError, match="skill is 'detect', and this engine's model has no"):
            plain.submit(prompt, skill="detect")
        with pytest.raises(RequestError, match="point needs region heads"):
            plain.point(image_of(64, 3), prompt)
    with pytest.raises(ConfigError, match="object_values is 2; ask for objects by skill="):
        engine.submit(prompt, SamplingParams(object_values=2))
    with pytest.raises(RequestError, match="object_values is 2, and this forward gives no values"):
        check_admission(Limits(VOCAB, 64, 5, 13, 2), prompt, RowParams(object_values=2))
    with pytest.raises(ConfigError, match="for a decoder of width 32, and this one is 64 wide"):
        tiny_engine(model[1], 2, region=random_heads(32))
    with pytest.raises(ConfigError, match=r"region is RegionConfig\(.*; give RegionHeads"):
        tiny_engine(model[1], 2, region=heads.config)


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["coord_decoder.bias", "size_encoder.weight", "coord_features"])
def test_hazard_30_heads_that_would_make_rows_of_text_nan_are_refused(
    name: str, weight: float, model: tuple[PreTrainedModel, Path]
) -> None:
    damaged = random_heads(64)
    damaged.state_dict()[name][..., 1] = weight
    with pytest.raises(ConfigError, match=f"{name} of the region heads holds NaN or infinity in"):
        tiny_engine(model[1], 2, region=damaged)
