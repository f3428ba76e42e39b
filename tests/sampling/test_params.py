"""SamplingParams: what is accepted, and what each refusal says."""

import copy
import dataclasses
import inspect
import math
import pickle
import re
from fractions import Fraction
from functools import cached_property, partial

import numpy as np
import pytest
import torch

from photon_ext.errors import ConfigError
from photon_ext.row_params import FIELDS
from photon_ext.row_words import row_words
from photon_ext.runtime import RowParams
from photon_ext.sampling import SamplingParams, from_allowed_ids
from photon_ext.sampling.constraints import AllowedIds
from photon_ext.sampling.params import MAX_STOP_CHARACTERS


def test_defaults_are_greedy_without_stops() -> None:
    params = SamplingParams()
    assert (params.temperature, params.stop, params.stop_token_ids, params.constraint) == (
        0.0,
        (),
        (),
        None,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -3),
        ("max_new_tokens", 2.5),
        ("max_new_tokens", True),
        ("temperature", -0.5),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e-9),
        ("temperature", 1e39),
        ("temperature", "hot"),
        ("temperature", 10**40),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 0.5),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("</s>",)),
        ("stop_token_ids", 3),
        ("include_stop", 1),
        ("stop", ("",)),
        ("stop", (3,)),
        ("stop_token_ids", b"ab"),
        ("stop_token_ids", bytearray(b"ab")),
        ("stop", b"ab"),
        ("constraint", "json"),
        ("constraint", AllowedIds),
        ("logprobs_mode", "cooked"),
        ("logprobs_mode", np.array(["raw", "raw"])),
        ("seed", np.array([1, 2])),
        ("seed", torch.zeros((), dtype=torch.int64, device="meta")),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as raised:
        SamplingParams(**{name: value})
    offender = value[0] if isinstance(value, tuple) else value
    assert str(raised.value).startswith(name)
    assert "give " in str(raised.value)
    assert name == "constraint" or repr(offender) in str(raised.value)
    assert isinstance(raised.value, ValueError)


def test_a_seed_may_be_any_integer_of_torch() -> None:
    assert SamplingParams(seed=torch.tensor(7)).seed == 7
    assert SamplingParams(seed=torch.tensor(7, dtype=torch.uint8)).seed == 7


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_tokens", "max_new_tokens"),
        ("n_predict", "max_new_tokens"),
        ("max_completion_tokens", "max_new_tokens"),
        ("stop_ids", "stop_token_ids"),
        ("include_stop_str_in_output", "include_stop"),
        ("temprature", "temperature"),
    ],
)
def test_the_name_that_another_engine_has_for_it_is_answered_with_ours(
    name: str, meant: str
) -> None:
    with pytest.raises(
        ConfigError,
        match=f"^sampling has no parameter '{name}'; did you mean {meant}[?] There are max_new_",
    ):
        SamplingParams(**{name: 5})


@pytest.mark.parametrize("name", ["best_of", "response_format"])
def test_what_is_not_there_yet_is_said_to_be_so(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is not supported yet; leave it out: there are"):
        SamplingParams(**{name: 1})


def test_a_name_that_is_like_no_other_is_answered_with_all_that_there_are() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^sampling has no parameter 'qqq'; there are max_new_tokens, .*, constraint, ",
    ):
        SamplingParams(qqq=1)


def test_they_are_copied_pickled_and_replaced_as_any_dataclass() -> None:
    params = SamplingParams(12, stop="x", seed=4)
    assert copy.copy(params) == pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, seed=5) == SamplingParams(12, stop="x", seed=5)
    assert isinstance(params, RowParams)
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.init]
    assert list(inspect.signature(SamplingParams).parameters) == names


def test_a_constraint_makes_a_row_constrained_and_nothing_else_does() -> None:
    assert SamplingParams(constraint=from_allowed_ids([1])).constrained
    form = SamplingParams(regex="ab")
    assert form.constrained
    assert not dataclasses.replace(form, regex=None).constrained
    with pytest.raises(ConfigError, match="no parameter 'constrained'; did you mean constraint"):
        SamplingParams(constrained=True)


def test_what_the_row_is_run_with_is_what_was_asked_within_the_engines_cap() -> None:
    params = SamplingParams(50, 0.5, 7, (3,), stop="x", constraint=from_allowed_ids([1]))
    assert params.row_params(9, (2, 3)) == RowParams(
        max_new_tokens=9, temperature=0.5, seed=7, stop_token_ids=(2, 3), constrained=True
    )


def test_a_single_stop_string_is_a_stop_string_and_not_its_letters() -> None:
    assert SamplingParams(stop="END").stop == ("END",)


def test_stop_strings_have_room_for_so_many_characters_and_no_more() -> None:
    half = "x" * (MAX_STOP_CHARACTERS // 2)
    assert SamplingParams(stop=[half, half]).stop == (half, half)
    with pytest.raises(
        ConfigError, match="stop holds 3 strings of 16385 characters in all; give at most 16384"
    ):
        SamplingParams(stop=[half, half, "!"])


def test_half_a_character_is_no_stop_string() -> None:
    with pytest.raises(
        ConfigError,
        match=r"stop holds 'ab\\udcff' with a surrogate, U\+DCFF, at character 2; give valid "
        r"Unicode text",
    ):
        SamplingParams(stop="ab\udcff")


@pytest.mark.parametrize(
    "name", ["max_new_tokens", "temperature", "seed", "stop_token_ids", "stop"]
)
def test_integers_too_large_for_their_digits_to_be_written_are_told_by_their_size(
    name: str,
) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is a negative integer of 16610 bits; give"):
        SamplingParams(**{name: -(10**5000)})


def test_lists_become_tuples_so_that_params_stay_hashable_and_frozen() -> None:
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2])
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (1, 2))
    assert hash(params) == hash(SamplingParams(stop=("a", "b"), stop_token_ids=(1, 2)))


def test_edges_of_the_ranges_are_accepted() -> None:
    SamplingParams(
        max_new_tokens=1, temperature=0.001, seed=2**64 - 1, constraint=from_allowed_ids([1])
    )
    SamplingParams(temperature=10000)


@pytest.mark.parametrize(
    "value", [np.float32(0.5), np.float16(0.5), np.float64(0.5), Fraction(1, 2)]
)
def test_every_kind_of_real_number_is_a_temperature(value: float) -> None:
    words = row_words(SamplingParams(temperature=value, seed=1), 1)
    assert words == row_words(SamplingParams(temperature=0.5, seed=1), 1)
    with pytest.raises(ConfigError, match=r"temperature is .*; give 0 for greedy"):
        SamplingParams(temperature=-value)


@pytest.mark.parametrize(
    "name", sorted(FIELDS.keys() - {"stop_token_ids", "logit_bias", "constrained"})
)
@pytest.mark.parametrize("value", [(), (1,), [], {}, "1", b"1"])
def test_a_collection_is_no_number(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is {re.escape(repr(value))}; give "):
        SamplingParams(**{name: value})


def test_numbers_of_numpy_become_plain_ones_which_do_not_overflow() -> None:
    names = ("max_new_tokens", "seed", "top_k", "min_tokens", "logprobs")
    for kind in (np.int8, np.uint64, np.array):
        params = SamplingParams(**{name: kind(9) for name in names}, stop_token_ids=[kind(9)])
        assert {type(getattr(params, name)) for name in names} == {int}
        assert type(params.stop_token_ids[0]) is int
        assert params.sample(2).seed == 11
    assert type(SamplingParams(temperature=1).temperature) is float
    least = SamplingParams(top_p=np.float32(1e-6), repetition_penalty=np.float32(0.01))
    assert (least.top_p, least.repetition_penalty) == (1e-6, 0.01)


@pytest.mark.parametrize(("kind", "cap"), [(RowParams, "int"), (SamplingParams, "int | None")])
def test_the_signature_that_help_shows_has_types_alone(kind: type, cap: str) -> None:
    signature = str(inspect.signature(kind))
    begin = f"(max_new_tokens: {cap} = 128, temperature: float = 0.0, seed: int |"
    assert signature.startswith(begin)
    assert "Field(" not in signature


def constraint(**attributes: object) -> object:
    """An object of a class with these attributes."""
    methods = {"advance": lambda self, token: None, "fill_bitmask": lambda self, words: None}
    return type("Grammar", (), {**methods, **attributes})()


def done(*_: object) -> bool:
    return False


@pytest.mark.parametrize(
    "finished",
    [done, staticmethod(done), classmethod(done), partial(done)],
    ids=lambda value: type(value).__name__,
)
def test_a_method_that_says_whether_a_constraint_is_finished_is_refused(finished: object) -> None:
    with pytest.raises(
        ConfigError,
        match=r"constraint is a Grammar; its finished is a method, .*; make it a property",
    ):
        SamplingParams(constraint=constraint(finished=finished))


@pytest.mark.parametrize(
    "finished",
    [property(done), cached_property(done), False],
    ids=lambda value: type(value).__name__,
)
def test_a_constraint_may_be_finished_by_a_property_or_an_attribute(finished: object) -> None:
    SamplingParams(constraint=constraint(finished=finished))


def test_a_constraint_is_not_asked_anything_before_its_request_runs() -> None:
    class Untouchable:
        """`finished` as a property that raises, and methods as attributes of the object."""

        def __init__(self) -> None:
            self.advance = self.fill_bitmask = lambda _: None

        @property
        def finished(self) -> bool:
            raise AssertionError("asked too early")

    constraint = Untouchable()
    assert SamplingParams(constraint=constraint).constraint is constraint


def test_answers_of_one_prompt_have_seeds_of_their_own() -> None:
    params = SamplingParams(seed=2**64 - 1, temperature=1.0)
    assert [params.sample(index).seed for index in range(3)] == [2**64 - 1, 0, 1]
    assert SamplingParams().sample(2).seed is None
    with pytest.raises(ConfigError, match=r"n is a keyword of Engine\.generate"):
        SamplingParams(n=2)
