"""Which keys are captured, and which of them a step gets: the smallest that holds it."""

from __future__ import annotations

import pytest

from photon_ext.runtime.step import StepKey
from photon_ext.runtime.step_features import StepFeatures
from photon_ext.runtime.step_keys import StepKeys, step_keys

LADDER = StepKeys((1, 8, 16, 20), (4, 32), mixed=True)


def made(**changes: object) -> StepKeys:
    arguments: dict[str, object] = {
        "max_rows": 20,
        "chunk": 32,
        "buckets": None,
        "prefill_buckets": (4, 32),
        "mixed": True,
        "graph": True,
        "captures_prefill": True,
    }
    return step_keys(**{**arguments, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "tokens", "expected"),
    [
        (0, 1, (0, 4, 4)),
        (0, 4, (0, 4, 4)),
        (0, 5, (0, 32, 20)),
        (0, 32, (0, 32, 20)),
        (1, 1, (1, 4, 4)),
        (1, 5, (1, 32, 19)),
        (2, 4, (8, 4, 4)),
        (2, 5, (8, 32, 18)),  # more than one row decodes, so that 18 are left for chunks
        (8, 32, (8, 32, 18)),
        (9, 32, (16, 32, 11)),
        (16, 32, (16, 32, 11)),
        (17, 4, (20, 4, 3)),
        (17, 32, (20, 32, 3)),
        (19, 32, (20, 32, 3)),
    ],
)
def test_a_step_gets_the_next_larger_bucket_of_rows_and_of_tokens(
    rows: int, tokens: int, expected: tuple[int, int, int]
) -> None:
    for split in (False, True):
        assert LADDER.find(rows, tokens, 1, split) == StepKey(*expected, split)


def test_what_is_larger_than_every_graph_has_none() -> None:
    assert LADDER.find(0, 33, 1, False) is None
    assert LADDER.find(3, 33, 1, False) is None
    assert StepKeys((4,), (8,)).find(1, 2, 1, False) is None
    assert StepKeys((4,)).find(0, 2, 1, False) is None


@pytest.mark.parametrize("max_rows", [1, 2, 8, 9, 20, 33])
@pytest.mark.parametrize("buckets", [None, (3,), (1, 2, 3, 4, 5, 6, 7)])
def test_every_step_that_can_be_fits_its_key(
    max_rows: int, buckets: tuple[int, ...] | None
) -> None:
    """Any rows that decode, the others with chunks of a token or more: of the set, smallest."""
    keys = made(max_rows=max_rows, buckets=buckets)
    captured = set(keys.all())
    assert len(captured) == len(keys.all())
    for rows in range(max_rows):
        for tokens in range(1, 33):
            key = keys.find(rows, tokens, 1, True)
            assert key in captured
            assert key.chunks >= min(tokens, max_rows - rows)
            assert key.segments <= keys.max_segments
            larger = [
                other
                for other in captured
                if bool(other.decode_rows) == bool(rows)
                and rows <= other.decode_rows <= key.decode_rows
                and tokens <= other.chunk_tokens <= key.chunk_tokens
            ]
            assert {(other.decode_rows, other.chunk_tokens) for other in larger} == {key[:2]}


@pytest.mark.parametrize(
    ("changes", "decode", "prefill", "mixed"),
    [
        ({}, 4, 2, 8),
        ({"mixed": False}, 4, 2, 0),
        ({"prefill_buckets": ()}, 4, 0, 0),
        ({"prefill_buckets": None, "captures_prefill": False}, 4, 0, 0),
        ({"prefill_buckets": None}, 4, 1, 4),
        ({"prefill_buckets": (4, 32, 33)}, 4, 2, 8),
        ({"graph": False}, 4, 0, 0),
        ({"buckets": ()}, 1, 2, 2),
        ({"max_rows": 1}, 1, 2, 0),  # a row decodes, or has a prompt
        ({"max_rows": 256, "prefill_buckets": (64, 128, 256), "chunk": 256}, 7, 3, 21),
    ],
)
def test_the_set_is_small_and_told(
    changes: dict[str, object], decode: int, prefill: int, mixed: int
) -> None:
    keys = made(**changes).all()
    counts = [
        sum(key.chunk_tokens == 0 for key in keys),
        sum(key.decode_rows == 0 for key in keys),
        sum(bool(key.decode_rows and key.chunk_tokens) for key in keys),
    ]
    assert counts == [2 * decode, 2 * prefill, 2 * mixed]


def test_where_empty_segments_cost_time_steps_have_room_for_few_chunks() -> None:
    keys = StepKeys((1, 8, 64), (64, 1024, 2048), mixed=True, chunk_tokens=128)
    assert keys.find(3, 64, 4, False) == StepKey(8, 64, 4, False)
    assert keys.find(3, 64, 5, False) == StepKey(8, 1024, 8, False)
    assert keys.find(3, 64, 9, False) == StepKey(8, 2048, 16, False)
    assert keys.find(3, 64, 17, False) is None
    assert keys.find(62, 64, 2, False) == StepKey(64, 64, 4, False)
    assert keys.max_segments == 64 + 16


LORA, BOTH = StepFeatures.LORA, StepFeatures.LORA | StepFeatures.SPATIAL


@pytest.mark.parametrize(
    ("keys", "sizes", "features"),
    [
        (
            StepKeys((1, 3), (4,), mixed=True, features=BOTH),
            [(1, 0, 0), (3, 0, 0), (0, 4, 3), (1, 4, 2), (3, 4, 1)],
            [0, 1, 2, 3],
        ),
        (StepKeys((2,), features=LORA), [(2, 0, 0)], [0, 2]),
        (
            StepKeys((1, 8), (4, 8), mixed=True, chunk_tokens=2),
            [
                *((1, 0, 0), (8, 0, 0), (0, 4, 4), (0, 8, 4)),
                *((1, 4, 4), (1, 8, 4), (8, 4, 4), (8, 8, 4)),
            ],
            [0],
        ),
    ],
)
def test_keys_are_captured_in_an_order_that_stays(
    keys: StepKeys, sizes: list[tuple[int, int, int]], features: list[int]
) -> None:
    """By sizes, then split, then features, ascending: graphs lie in memory as they always did."""
    expected = [(*size, split, each) for size in sizes for split in (0, 1) for each in features]
    assert [key[:5] for key in keys.all()] == expected
    assert not any(key.scored for key in keys.all())


@pytest.mark.parametrize("features", [*StepFeatures, BOTH])
def test_steps_with_features_have_keys_of_their_own(features: StepFeatures) -> None:
    found = made(features=BOTH).find(3, 4, 1, True, features)
    assert found == StepKey(8, 4, 4, True, features)
    assert found in made(features=BOTH).all()
    assert found in made(features=features).all()
    assert (found in made().all()) is (features is StepFeatures.NONE)
