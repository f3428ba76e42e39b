"""Prompts with embeddings in the place of tokens, over real decoders: the tokens are those of
transformers' forward with the same embeddings, whatever the chunks, the pages and the traffic.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from photon_ext.engine import Engine, Output
from photon_ext.errors import ConfigError, RequestError
from photon_ext.models.loading.loader import load_model
from photon_ext.models.vision import VisionConfig, VisionEncoder
from photon_ext.sampling import SamplingParams
from tests.engine.byte_tokenizer import byte_tokenizer
from tests.engine.test_engine_models import prompt_of, tiny_engine
from tests.models.tiny import TINY, VOCAB, saved_tiny_model

NEW = 10
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True, logprobs=3)
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"


def hidden_of(model: PreTrainedModel) -> int:
    return int(model.get_input_embeddings().weight.shape[1])


def image_of(hidden: int, count: int, seed: int = 0) -> torch.Tensor:
    """Embeddings as large as those of the tiny models' tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, hidden, generator=generator) * hidden**-0.5


def in_place(model: PreTrainedModel, parts: list[Any]) -> torch.Tensor:
    """The parts of a prompt as embeddings, [1, tokens, hidden]."""
    table = model.get_input_embeddings()
    rows = [
        part.float() if isinstance(part, torch.Tensor) else table(torch.tensor(part))
        for part in parts
    ]
    return torch.cat(rows)[None]


def greedy(model: PreTrainedModel, parts: list[Any], count: int = NEW) -> list[int]:
    """The greedy tokens of transformers."""
    embeds = in_place(model, parts)
    found = model.generate(
        inputs_embeds=embeds,
        attention_mask=torch.ones(embeds.shape[:2]),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    return found[0].tolist()


def tokens_of(outputs: list[Output]) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


def check_embeds(name: str, folder: Path, device: str) -> None:
    """Tokens equal transformers', alone and batched with text, at depth 1 and 2."""
    model = saved_tiny_model(name, folder)
    image = image_of(hidden_of(model), 20)
    prompts = [
        [image],
        [prompt_of(3, VOCAB), image, prompt_of(5, VOCAB)],
        [image[:1], prompt_of(4, VOCAB), image_of(hidden_of(model), 7, 1)],
        [prompt_of(12, VOCAB)],
    ]
    asked = [{"prompt_embeds": parts} for parts in prompts[:-1]] + prompts[-1]
    expected = [greedy(model, parts) for parts in prompts]
    for depth in (1, 2):
        with tiny_engine(folder, depth, device, embeds_tokens=50) as engine:
            batched = engine.generate(asked, GREEDY)
            alone = [engine.generate([prompt], GREEDY)[0] for prompt in asked]
        assert tokens_of(batched) == tokens_of(alone) == expected
        assert [output.prompt_tokens for output in batched] == [20, 28, 12, 12]


@pytest.mark.parametrize("name", sorted(TINY))
def test_tokens_equal_transformers_with_embeddings_alone_and_batched(
    name: str, tmp_path: Path
) -> None:
    check_embeds(name, tmp_path, "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return saved_tiny_model("llama-plain", folder), folder


@pytest.fixture(scope="module")
def engine(model: tuple[PreTrainedModel, Path]) -> Iterator[Engine]:
    with tiny_engine(model[1], 2, embeds_tokens=30) as made:
        yield made


def test_embeddings_of_the_models_tokens_give_the_bits_of_the_tokens(
    model: tuple[PreTrainedModel, Path], engine: Engine
) -> None:
    prompt = prompt_of(20, VOCAB)
    own = model[0].get_input_embeddings().weight[prompt]
    with torch.no_grad():
        mixed: list[Any] = [prompt[:7], own[7:15], *prompt[15:]]
    (expected,) = engine.generate([prompt], GREEDY, cache_salt="tokens")
    turned = own.detach().numpy()[::-1].copy()[::-1]  # of a negative stride
    for parts in (own, mixed, turned, [own[:3], np.array(prompt[3:6]), own[6:].detach().numpy()]):
        (output,) = engine.generate([{"prompt_embeds": parts}], GREEDY)
        assert output.token_ids == expected.token_ids
        assert output.logprobs == expected.logprobs


@pytest.mark.parametrize("prefill", ["mixed", "separate"])
@pytest.mark.parametrize("chunk", [1, 4, 11, 64])
def test_hazard_24_to_27_embeddings_may_be_cut_anywhere(
    chunk: int, prefill: str, model: tuple[PreTrainedModel, Path]
) -> None:
    parts = [prompt_of(3, VOCAB), image_of(64, 17), prompt_of(2, VOCAB), image_of(64, 5, 1)]
    expected = greedy(model[0], parts)
    sizes = {"embeds_tokens": 22, "chunk": chunk, "prefill": prefill}
    with tiny_engine(model[1], 2, **sizes) as engine:
        # the second waits until the places of the first are free, beside text that decodes
        asked = [prompt_of(5, VOCAB), {"prompt_embeds": parts}, {"prompt_embeds": parts[::-1]}]
        outputs = engine.generate(asked, GREEDY)
    assert tokens_of(outputs)[1:] == [expected, greedy(model[0], parts[::-1])]


def test_graphs_and_eager_steps_read_the_same_embeddings(
    model: tuple[PreTrainedModel, Path],
) -> None:
    parts = [image_of(64, 9), prompt_of(2, VOCAB)]
    with tiny_engine(model[1], 2, graph=False, embeds_tokens=9) as engine:
        (output,) = engine.generate([{"prompt_embeds": parts}], GREEDY)
    assert list(output.token_ids) == greedy(model[0], parts)


def test_pages_are_shared_by_the_content_of_embeddings(model: tuple[PreTrainedModel, Path]) -> None:
    image, other = image_of(64, 20), image_of(64, 20)
    other[12] += 0.01
    text, page = prompt_of(5, VOCAB), 5
    with tiny_engine(model[1], 2, embeds_tokens=20) as engine:

        def cached(image: torch.Tensor, **options: Any) -> int:
            parts = [text, image, [7, 8]]
            (output,) = engine.generate([{"prompt_embeds": parts}], GREEDY, **options)
            assert list(output.token_ids) == greedy(model[0], parts)
            return output.cached_tokens

        assert cached(image) == 0
        assert cached(image.clone().double()) == 5 * page  # all but what follows the image
        assert cached(other) == 3 * page  # up to the page of the changed one
        assert cached(image_of(64, 20, 1)) == page  # the text before alone
        assert cached(image, cache_salt="tenant") == 0


def test_requests_with_the_same_image_read_it_once(model: tuple[PreTrainedModel, Path]) -> None:
    parts = [image_of(64, 20), [7, 8]]
    with tiny_engine(model[1], 2, embeds_tokens=20) as engine:
        outputs = engine.generate([{"prompt_embeds": parts}] * 4, GREEDY)
        assert engine.stats().prefix_hit_tokens == 3 * 20
    assert tokens_of(outputs) == [greedy(model[0], parts)] * 4


def check_embeds_under_pressure(folder: Path, depth: int, exact: bool, device: str) -> None:
    """Tokens do not depend on places and pages that come late, are lost, or are filled again."""
    prompts = [
        {"prompt_embeds": [prompt_of(i % 3, VOCAB, i), image_of(64, 8 + i, i), [i]]}
        for i in range(8)
    ]
    params = [
        SamplingParams(20 + 2 * i, (0.0, 1.0)[i % 2], seed=i, ignore_eos=True) for i in range(8)
    ]
    with tiny_engine(folder, 1, device, embeds_tokens=100, prefix_cache=False) as engine:
        expected = tokens_of(engine.generate(prompts, params))
        assert engine.stats().preemptions == 0
    # places for one or two requests, so that who comes back finds others in its own
    sizes = {"exact": exact, "embeds_tokens": 20, "num_pages": 14}
    with tiny_engine(folder, depth, device, **sizes) as engine:
        outputs = engine.generate(prompts, params)
        assert engine.stats().preemptions > 0
    assert tokens_of(outputs) == expected


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_i15_preempted_requests_with_embeddings_give_the_tokens_of_an_undisturbed_run(
    exact: bool, depth: int, model: tuple[PreTrainedModel, Path]
) -> None:
    check_embeds_under_pressure(model[1], depth, exact, "cpu")


def test_hazard_15_reused_places_show_nothing_of_their_last_holder(
    model: tuple[PreTrainedModel, Path],
) -> None:
    """Nor does an end in the middle of a prompt keep them."""
    images = [image_of(64, 30, seed) for seed in range(6)]
    with tiny_engine(model[1], 2, chunk=4, embeds_tokens=30, prefix_cache=False) as engine:
        requests = [engine.submit({"prompt_embeds": image}, GREEDY) for image in images]
        for request in requests[::2]:
            request.cancel()
        kept = [request.result(60) for request in requests[1::2]]
        for request in requests:
            request.result(60)
    assert engine._scheduler._pager._embeds.free == 30
    assert tokens_of(kept) == [greedy(model[0], [image]) for image in images[1::2]]


def test_the_caller_may_change_a_tensor_once_it_is_submitted(
    model: tuple[PreTrainedModel, Path], engine: Engine
) -> None:
    image = image_of(64, 30, 3)
    expected = greedy(model[0], [image])
    request = engine.submit({"prompt_embeds": image}, GREEDY)
    image.zero_()
    assert list(request.result(60).token_ids) == expected


def test_several_answers_to_an_image(model: tuple[PreTrainedModel, Path], engine: Engine) -> None:
    image = image_of(64, 11, 4)
    outputs = engine.generate([{"prompt_embeds": image}], GREEDY, n=3)
    assert tokens_of(outputs) == [greedy(model[0], [image])] * 3


def chat_engine(folder: Path, template: str, **options: Any) -> Engine:
    loaded = load_model(folder, "float32", torch.device("cpu"))
    tokenizer = byte_tokenizer(template)
    return Engine.from_weights(
        loaded.config,
        loaded.weights,
        tokenizer,
        max_len=128,
        embeds_tokens=40,
        freeze=False,
        **options,
    )


def ids_of(text: str) -> list[int]:
    return byte_tokenizer().encode(text)


def test_texts_and_chats_have_embeddings_where_they_were_put(
    model: tuple[PreTrainedModel, Path],
) -> None:
    first, second = image_of(64, 6), image_of(64, 3, 1)
    messages = [
        {"role": "system", "content": "be"},
        {
            "role": "user",
            "content": [
                {"type": "embeds", "embeds": first},
                {"type": "text", "text": "or"},
                {"type": "embeds", "embeds": second},
                {"type": "text", "text": "?"},
            ],
        },
    ]
    chat = [ids_of("[system]be[user]"), first, ids_of("or"), second, ids_of("?>")]
    texts = {"prompt_embeds": ["a", first, "b"]}
    with chat_engine(model[1], CHAT) as engine:
        assert list(engine.chat(messages, GREEDY).token_ids) == greedy(model[0], chat)
        (output,) = engine.generate([texts], GREEDY)
    assert list(output.token_ids) == greedy(model[0], [ids_of("a"), first, ids_of("b")])


def test_a_template_that_loses_embeddings_is_told(model: tuple[PreTrainedModel, Path]) -> None:
    content = [{"type": "embeds", "embeds": image_of(64, 6)}]
    with (
        chat_engine(model[1], "{{ messages[0].content | upper }}") as engine,
        pytest.raises(RequestError, match="drops, repeats or moves the embeddings"),
    ):
        engine.chat([{"role": "user", "content": content}])


VISION = VisionConfig(
    width=24,
    layers=1,
    heads=2,
    intermediate=30,
    projector=32,
    hidden=64,
    crop_size=30,
    patch=6,
    margin=1,
    most_tiles=4,
)  # an image is 25 embeddings


def test_chats_have_images_where_they_were_put(model: tuple[PreTrainedModel, Path]) -> None:
    torch.manual_seed(0)
    encoder = VisionEncoder(VISION)
    picture = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "what?"}]
    expected = [ids_of("[user]"), encoder.encode(picture), ids_of("what?>")]
    with chat_engine(model[1], CHAT, vision=encoder) as engine:
        messages = [{"role": "user", "content": content}]
        first, again = engine.chat(messages, GREEDY), engine.chat(messages, GREEDY)
        whole = {
            "prompt_embeds": [ids_of("[user]"), engine.encode_image(picture), ids_of("what?>")]
        }
        (given,) = engine.generate([whole], GREEDY)
        with pytest.raises(RequestError, match=r"the image is 'cat\.png'; give"):
            engine.chat([{"role": "user", "content": [{"type": "image", "image": "cat.png"}]}])
    assert tokens_of([first, again, given]) == [greedy(model[0], expected)] * 3
    assert again.cached_tokens == given.cached_tokens == 32  # pages of 16 of 37 tokens


class CountingEncoder(VisionEncoder):
    """Knows how many images it has encoded, and on which threads."""

    def encode(self, image: Any) -> torch.Tensor:
        self.threads = [*getattr(self, "threads", []), threading.current_thread()]
        return super().encode(image)


def test_several_answers_to_an_image_encode_it_once_on_the_callers_thread(
    model: tuple[PreTrainedModel, Path],
) -> None:
    encoder = CountingEncoder(VISION)
    picture = np.zeros((9, 9, 3), np.uint8)
    content = [{"type": "image", "image": picture}]
    with chat_engine(model[1], CHAT, vision=encoder) as engine:
        engine.generate([[{"role": "user", "content": content}]], GREEDY, n=3)
    assert encoder.threads == [threading.current_thread()]


def test_images_need_an_encoder_that_fits(
    model: tuple[PreTrainedModel, Path], engine: Engine
) -> None:
    with pytest.raises(RequestError, match="this engine has no vision encoder; make it with"):
        engine.encode_image(b"")
    with pytest.raises(ConfigError, match="embeds_tokens is 0, and an image is 25 embeddings"):
        tiny_engine(model[1], 1, vision=VisionEncoder(VISION))
    with pytest.raises(ConfigError, match="vision is 'vit'; give a VisionEncoder, or an object"):
        tiny_engine(model[1], 1, vision="vit", embeds_tokens=25)
    mute = VisionEncoder(VISION)
    mute.encode = lambda image: None  # type: ignore[assignment,method-assign,return-value]
    with (
        tiny_engine(model[1], 1, vision=mute, embeds_tokens=25) as told,
        pytest.raises(RequestError, match=r"returned None; it must return a tensor \[n, 64\]"),
    ):
        told.encode_image(b"")
    narrow = VisionEncoder(replace(VISION, hidden=32))
    with pytest.raises(ConfigError, match="embeddings of width 32, and the model's are 64 wide"):
        tiny_engine(model[1], 1, vision=narrow, embeds_tokens=25)


NAN, LARGE = image_of(64, 3), image_of(64, 3).double()
NAN[2, 5], LARGE[1, 0] = float("nan"), 1e39


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        (image_of(63, 3), "shape (3, 63); expected [n, 64]"),
        (image_of(64, 3)[0], "shape (64,); expected [n, 64]"),
        (image_of(64, 0), "shape (0, 64); expected [n, 64]"),
        (NAN, "embedding 2 of 3 of the prompt holds NaN or infinity in float32"),
        ([[5], LARGE], "embedding 1 of 3 of the prompt holds NaN or infinity"),
        (torch.ones(3, 64, dtype=torch.int32), "is a Tensor of torch.int32 with shape (3, 64)"),
        (torch.ones(3, 64, dtype=torch.complex64), "is a Tensor of torch.complex64"),
        (torch.ones(3, 64, device="meta"), "cannot be read"),
        (torch.ones(3, 64).to_sparse(), "cannot be read"),
        (
            [image_of(64, 20), image_of(64, 11)],
            "holds 31 embeddings or more, and the engine has 30",
        ),
        ([], "the prompt is empty"),
        (None, "prompt_embeds is a NoneType; give a tensor [n, hidden], or a list of parts"),
        ([image_of(64, 2), None], "prompt_embeds holds None; give a tensor"),
        ([image_of(64, 2), [-2]], "the prompt holds -2; token ids of this model are 0 to 130"),
        ([-3, image_of(64, 2)], "the prompt holds -3; token ids of this model are 0 to 130"),
        (["text", image_of(64, 2)], "this engine has no tokenizer"),
        ([image_of(64, 30), prompt_of(40, VOCAB)], "the prompt has 70 tokens"),
    ],
)
def test_hazard_30_bad_embeddings_are_refused_and_block_nobody(
    parts: Any, told: str, engine: Engine, model: tuple[PreTrainedModel, Path]
) -> None:
    image = image_of(64, 4)
    bystander = engine.submit({"prompt_embeds": image}, GREEDY)
    if told.startswith("this engine has no tokenizer"):
        engine = tokenless(model[1])
    with pytest.raises(RequestError, match=re.escape(told)):
        engine.submit({"prompt_embeds": parts}, GREEDY)
    assert list(bystander.result(60).token_ids) == greedy(model[0], [image])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_a_shape_are_refused(engine: Engine) -> None:
    for dtype in (torch.float32, torch.int64):
        nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], dtype=dtype)
        for prompt in (nested, {"prompt_embeds": [nested]}):
            with pytest.raises(RequestError, match=r"has no shape \(.*\); give a dense tensor"):
                engine.submit(prompt)


def tokenless(folder: Path) -> Engine:
    loaded = load_model(folder, "float32", torch.device("cpu"))
    return Engine.from_weights(
        loaded.config, loaded.weights, max_rows=1, max_len=16, embeds_tokens=4, freeze=False
    )


def test_ids_of_places_are_no_prompt(engine: Engine) -> None:
    """They would show the embeddings of others."""
    with pytest.raises(RequestError, match="the prompt holds -2; token ids"):
        engine.submit([5, -2])


def test_an_engine_without_places_says_what_it_needs(model: tuple[PreTrainedModel, Path]) -> None:
    with tiny_engine(model[1], 1) as engine:
        with pytest.raises(RequestError, match="make it with embeds_tokens"):
            engine.submit({"prompt_embeds": image_of(64, 1)})
        with pytest.raises(RequestError, match=re.escape("the prompt is {'embeds': 1}; give")):
            engine.submit({"embeds": 1})
    with pytest.raises(ConfigError, match="embeds_tokens is -1; give an integer from 0"):
        tiny_engine(model[1], 1, embeds_tokens=-1)
