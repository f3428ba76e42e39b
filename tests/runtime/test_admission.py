"""A request is checked whole before a row is taken: what cannot be served costs nobody anything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from photon_ext.errors import ConfigError, RequestError
from photon_ext.layout import HOST_MASK, ROW_COLUMNS, RowColumn
from photon_ext.row_params import FIELDS
from photon_ext.row_words import row_words
from photon_ext.runtime import Pipeline, RowParams
from photon_ext.testing import Request, SimRuntime, ToyForward, ToyModel
from tests.ops.tables import float_bits

PROMPT, PAGES = [1, 2, 3], [0, 1, 2]
SEED = "an integer from 0 to 2\\*\\*64 - 1, or None for a new one each time"
TEMPERATURE = "0 for greedy decoding, or a number from 0.001 to 10000"
TOP_K = "0 for all token ids, or an integer from 1 to 2147483647"
BIASES = "token ids, integers >= 0, with numbers from -100 to 100 or -inf"
CAP = "an integer from 1 to 2147483647"


@pytest.fixture
def runtime() -> SimRuntime:
    return SimRuntime(max_rows=2, max_len=12, page_size=4)


@pytest.fixture
def pipeline(runtime: SimRuntime) -> Pipeline:
    return Pipeline(runtime, ToyForward(runtime), vocab_size=32)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"max_new_tokens": 0}, f"max_new_tokens is 0; give {CAP}"),
        (
            {"max_new_tokens": -(2**70)},
            f"max_new_tokens is -1180591620717411303424; give {CAP}",
        ),
        ({"max_new_tokens": 2.0}, f"max_new_tokens is 2.0; give {CAP}"),
        ({"max_new_tokens": True}, f"max_new_tokens is True; give {CAP}"),
        ({"max_new_tokens": None}, f"max_new_tokens is None; give {CAP}"),
        ({"max_new_tokens": 2**31}, f"max_new_tokens is 2147483648; give {CAP}"),
        ({"stop_token_ids": None}, "stop_token_ids is None; give a list or a tuple"),
        ({"stop_token_ids": 3}, "stop_token_ids is 3; give a list or a tuple"),
        ({"stop_token_ids": "ab"}, "stop_token_ids is 'ab'; give a list or a tuple"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids holds 'x'; give token ids, integers >= 0"),
        ({"stop_token_ids": [1, -2]}, "stop_token_ids holds -2; give token ids, integers >= 0"),
        ({"temperature": 1e300}, f"temperature is 1e\\+300; give {TEMPERATURE}"),
        ({"temperature": 1e-40}, f"temperature is 1e-40; give {TEMPERATURE}"),
        ({"temperature": float("nan")}, f"temperature is nan; give {TEMPERATURE}"),
        ({"temperature": float("inf")}, f"temperature is inf; give {TEMPERATURE}"),
        ({"temperature": -1.0}, f"temperature is -1.0; give {TEMPERATURE}"),
        ({"temperature": "1"}, f"temperature is '1'; give {TEMPERATURE}"),
        ({"temperature": True}, f"temperature is True; give {TEMPERATURE}"),
        ({"seed": 0.5}, f"seed is 0.5; give {SEED}"),
        ({"seed": -1}, f"seed is -1; give {SEED}"),
        ({"seed": 2**64}, f"seed is 18446744073709551616; give {SEED}"),
        ({"constrained": 1}, "constrained is 1; give True or False"),
        ({"top_k": -1}, f"top_k is -1; give {TOP_K}"),
        ({"top_k": 1.5}, f"top_k is 1.5; give {TOP_K}"),
        ({"top_k": 2**31}, f"top_k is 2147483648; give {TOP_K}"),
        ({"top_p": 0}, "top_p is 0; give a number from 0.000001 to 1"),
        ({"top_p": 1.01}, "top_p is 1.01; give a number from 0.000001 to 1"),
        ({"top_p": float("nan")}, "top_p is nan; give a number from 0.000001 to 1"),
        ({"min_p": -0.1}, "min_p is -0.1; give a number from 0 to 1"),
        ({"min_tokens": -1}, "min_tokens is -1; give an integer from 0 to max_new_tokens"),
        ({"min_tokens": True}, "min_tokens is True; give an integer from 0 to max_new_tokens"),
        (
            {"min_tokens": 129},
            "min_tokens is 129 and max_new_tokens 128; make the one smaller or the other larger",
        ),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; give a number from 0.01 to 100"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1; give a number from -2 to 2"),
        ({"frequency_penalty": True}, "frequency_penalty is True; give a number from -2 to 2"),
        ({"logprobs": 21}, "logprobs is 21; give None, or an integer from 0 to 20"),
        ({"logprobs": True}, "logprobs is True; give None, or an integer from 0 to 20"),
        ({"logit_bias": 5}, f"logit_bias is 5; give a dict of {BIASES}"),
        ({"logit_bias": [1, 2]}, f"logit_bias is \\[1, 2\\]; give a dict of {BIASES}"),
        ({"logit_bias": {-1: 0}}, f"logit_bias holds -1: 0; give {BIASES}"),
        ({"logit_bias": {"5": 0}}, f"logit_bias holds '5': 0; give {BIASES}"),
        ({"logit_bias": {5: 101}}, f"logit_bias holds 5: 101; give {BIASES}"),
        ({"logit_bias": {5: float("inf")}}, f"logit_bias holds 5: inf; give {BIASES}"),
        ({"logit_bias": {5: float("nan")}}, f"logit_bias holds 5: nan; give {BIASES}"),
        ({"min_p": "0"}, "min_p is '0'; give a number from 0 to 1"),
    ],
)
def test_a_bad_parameter_is_refused_when_it_is_made(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message + "$") as raised:
        RowParams(**bad)
    assert isinstance(raised.value, ValueError)


def test_the_bounds_of_every_parameter_are_allowed() -> None:
    least = RowParams(1, 1e-3, 0, [], False, 0, 1e-6, 0)  # type: ignore[arg-type]
    most = RowParams(2**31 - 1, 1e4, 2**64 - 1, [0, 2**31 - 1], True, 2**31 - 1, 1, 1)  # type: ignore[arg-type]
    assert (least.temperature, least.stop_token_ids) == (1e-3, ())
    assert (least.top_p, most.top_k, most.min_p) == (1e-6, 2**31 - 1, 1)
    assert (most.seed, most.stop_token_ids) == (2**64 - 1, (0, 2**31 - 1))
    assert RowParams(temperature=0).temperature == 0


def test_every_field_of_the_parameters_is_in_the_table() -> None:
    assert list(FIELDS) == [field.name for field in fields(RowParams)]


def test_the_words_of_a_row_are_its_parameters_and_its_generation() -> None:
    params = RowParams(77, 0.7, 0x89ABCDEF_01234567, (5, 6, 7), True, 40, 0.9, 0.05, 70)
    words = row_words(params, generation=9)
    expected = [0] * ROW_COLUMNS
    expected[RowColumn.REMAINING] = 77
    expected[RowColumn.ALIVE] = 1
    expected[RowColumn.GENERATION] = 9
    expected[RowColumn.STOP_COUNT] = 3
    expected[RowColumn.TEMPERATURE] = float_bits(0.7)
    expected[RowColumn.SEED_LOW] = 0x01234567
    expected[RowColumn.SEED_HIGH] = 0x89ABCDEF - 2**32
    expected[RowColumn.CONSTRAINT] = HOST_MASK
    expected[RowColumn.TOP_K] = 40
    expected[RowColumn.TOP_P] = float_bits(0.9)
    expected[RowColumn.MIN_P] = float_bits(0.05)
    expected[RowColumn.REPETITION_PENALTY] = float_bits(1.0)
    expected[RowColumn.STOP_AFTER] = 8  # 77 to 8 remain before each of the first 70 tokens
    assert words == expected
    assert row_words(RowParams(1, seed=0), 2)[RowColumn.CONSTRAINT] == 0


def test_no_seed_is_another_each_time_and_a_seed_is_the_same() -> None:
    def seed(params: RowParams) -> tuple[int, ...]:
        return tuple(row_words(params, 1)[RowColumn.SEED_LOW : RowColumn.SEED_HIGH + 1])

    free = RowParams(4)
    assert len({seed(free) for _ in range(20)}) > 15
    assert {seed(RowParams(4, seed=3)) for _ in range(5)} == {(3, 0)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": []}, "the prompt is empty; give at least one token"),
        ({"prompt_ids": None}, "the prompt is None; give a sequence of token ids"),
        ({"prompt_ids": "abc"}, "the prompt is 'abc'; give a sequence of token ids"),
        ({"prompt_ids": [1.5]}, "the prompt holds 1.5, which is no token id; give integers"),
        ({"prompt_ids": [True]}, "the prompt holds True, which is no token id"),
        ({"prompt_ids": [1, -1]}, "the prompt holds -1; token ids of this model are 0 to 31"),
        ({"prompt_ids": [32]}, "the prompt holds 32; token ids of this model are 0 to 31"),
        ({"params": RowParams(11)}, "3 tokens and max_new_tokens 11 exceed the context of 12"),
        ({"params": RowParams(4, stop_token_ids=(99,))}, "stop_token_ids holds 99; token ids"),
        (
            {"params": RowParams(4, stop_token_ids=tuple(range(5)))},
            "5 stop token ids, the model's own included; a row has 4 at most",
        ),
        ({"pages": None}, "pages are missing: with page_size 4 this request needs 2 pages"),
        ({"pages": 3}, "pages is 3; give a sequence of page numbers$"),
        ({"pages": [1]}, "1 pages given; this request needs 2, and a row holds 3 at most"),
        ({"pages": [1, 2, 3, 4]}, "4 pages given; this request needs 2, and a row holds 3"),
        ({"pages": [-1, 1]}, "pages holds -1; page numbers are 0 to 2147483647"),
        ({"pages": [1, 2**31]}, "pages holds 2147483648; page numbers are 0 to 2147483647"),
        ({"pages": [1, "2"]}, "pages holds '2', which is no page number; give integers"),
        ({"pages": [1, 1]}, r"pages \(1, 1\) names a page twice"),
    ],
)
def test_a_bad_request_is_refused_and_takes_no_row(
    runtime: SimRuntime, pipeline: Pipeline, change: dict[str, Any], message: str
) -> None:
    request = {"prompt_ids": PROMPT, "params": RowParams(4), "pages": PAGES, **change}
    with pytest.raises(RequestError, match=message):
        pipeline.admit(**request)
    assert runtime.table.free_rows == 2
    assert runtime.table.take_deltas() == []
    assert not pipeline.busy


@pytest.mark.parametrize("counted", [0, 32])
def test_penalties_need_counts_of_the_whole_vocabulary(counted: int) -> None:
    """Token 40 has no prompt bit among 32 ids: that may not show once a row is taken."""
    runtime = SimRuntime(max_rows=2, penalty_vocab=counted)
    pipeline = Pipeline(runtime, ToyForward(runtime, 64), vocab_size=64)
    with pytest.raises(RequestError, match="need the runtime's penalty_vocab, all of the vocab"):
        pipeline.admit([40], RowParams(4, presence_penalty=1.0))
    assert runtime.table.free_rows == 2


def test_parameters_of_another_kind_are_named(runtime: SimRuntime, pipeline: Pipeline) -> None:
    with pytest.raises(ConfigError, match=r"params is 5; give RowParams\(\.\.\.\)"):
        pipeline.admit(PROMPT, 5, PAGES)  # type: ignore[arg-type]
    assert runtime.table.free_rows == 2


def test_a_checked_request_is_admitted_as_it_is(pipeline: Pipeline) -> None:
    admission = pipeline.check(iter(PROMPT), RowParams(4, stop_token_ids=(7,)))
    assert (admission.prompt_ids, admission.kv_len) == ((1, 2, 3), 6)
    row = pipeline.admit(admission, pages=iter(PAGES))  # type: ignore[arg-type]
    assert (row.prompt_ids, row.params, row.pages) == ((1, 2, 3), admission.params, (0, 1, 2))


def test_the_context_can_be_filled_to_its_last_place(pipeline: Pipeline) -> None:
    row = pipeline.admit(PROMPT, RowParams(10), PAGES)
    tokens = 0
    while pipeline.busy:
        tokens += sum(len(event.tokens) for event in pipeline.tick())
    assert tokens == row.launched == 10


def test_what_a_generator_of_ids_raises_is_its_own(runtime: SimRuntime, pipeline: Pipeline) -> None:
    def ids() -> Iterator[int]:
        yield 1
        raise TypeError("not ours")

    with pytest.raises(TypeError, match="not ours"):
        pipeline.admit(ids(), RowParams(4), PAGES)
    assert runtime.table.free_rows == 2


@pytest.mark.parametrize("page_size", [None, 4])
def test_page_0_is_a_page_like_others(page_size: int | None) -> None:
    """One row has it alone, then another among others; neither is taken for a row without pages."""
    model, request = ToyModel(32), Request((1, 2, 3), 9)
    runtime = SimRuntime(max_rows=2, max_len=12, page_size=page_size)
    pipe = Pipeline(runtime, ToyForward(runtime), vocab_size=32)
    needed = 1 if page_size is None else 3
    pages = [tuple(range(needed)), tuple(reversed(range(needed)))]
    for held in pages:
        row = pipe.admit(request.prompt_ids, request.params, held)
        tokens: list[int | None] = []
        while pipe.busy:
            tokens += [token for event in pipe.tick() for token in event.tokens]
        assert row.pages == held
        assert tuple(tokens) == model.generate(request)


def test_a_fork_draws_other_seeds() -> None:
    """Else its requests would sample as those of its parent do."""
    drawn = RowParams().settled().seed
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writes, str(RowParams().settled().seed).encode())
        os._exit(0)
    os.waitpid(child, 0)
    of_child = int(os.read(reads, 32))
    os.close(reads), os.close(writes)
    own = RowParams().settled().seed
    assert len({drawn, of_child, own}) == 3
