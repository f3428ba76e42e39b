"""Which tests run under compute-sanitizer: of each function few cases, which together hold every
value, and where that is another kernel every pair of values.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.few_cases import PAIRS, Case, by_function, cover, is_hopper

# What differs between dtypes is arithmetic, not indexes or barriers: the Hopper kernels have one,
# of the portable ones one is enough.
HOPPER_DTYPE, PORTABLE_DTYPE = "torch.bfloat16", "torch.float32"

# Functions whose parameter is a seed, whose cases launch a kernel hundreds of times, or whose rows
# are many: the first cases.
FIRST = {
    "test_begin_step_equals_the_reference": 6,
    "test_publish_equals_the_reference": 4,
    "test_clusters_take_one_tile_after_another": 1,
    "test_one_id_has_more_than_is_asked_for_of_the_whole_row": 1,
    "test_sampling_equals_the_reference": 2,
}

# Functions that launch a kernel thousands of times, sample very many rows, or fill the device, and
# hold no size that others do not; one that makes a call fail on purpose, which memcheck would
# report; and those that run torch's matrix products between our kernels, where racecheck, which
# looks at our kernels alone, ends with an error of its own (memcheck finds nothing, and without
# that filter the first of them has passed).
LEFT_OUT = frozenset(
    {
        "test_more_tokens_than_a_grid_has_blocks_are_an_error",
        "test_all_parameters_together_draw_by_the_exact_distribution",
        "test_frequencies_are_those_of_what_is_kept",
        "test_odd_logits_draw_only_what_the_specification_keeps",
        "test_every_id_that_is_kept_is_drawn_and_no_other",
        "test_penalties_change_what_is_drawn_and_how_often",
        "test_temperature_draws_from_the_softmax",
        "test_any_number_of_tokens_has_the_bits_of_each_alone",
        "test_a_token_has_the_same_bits_however_many_blocks_it_meets_in",
        "test_a_token_has_the_same_bits_in_every_batch_and_every_run",
        "test_a_row_has_the_same_bits_in_every_batch",
        "test_a_row_has_the_same_bits_in_batches_of_several_launches",
        "test_steps_repeat_to_the_bit",
        "test_a_token_has_the_same_bits_in_one_run_and_in_several",
        "test_a_step_that_fills_the_device_has_the_bits_of_small_ones",
        "test_many_tokens_of_the_models_have_the_bits_of_few",
        "test_shapes_of_models",
        "test_without_torchs_products_no_bit_depends_on_how_a_long_prompt_is_cut",
        "test_through_torch_go_the_layers_of_a_long_chunk_and_not_its_head",
        "test_through_torch_go_the_layers_of_a_wide_decode_step_and_its_head",
        "test_chunks_of_few_tokens_are_exact_and_longer_ones_torchs_captured_or_not",
    }
)


def selected(cases: Iterable[Case]) -> list[str]:
    """The names of the tests to run, in the order given; cases of a function stand together."""
    names: list[str] = []
    for function, group in by_function(cases):
        if function not in LEFT_OUT:
            names += _of_function(
                [case for case in group if of_one_dtype(case)][: FIRST.get(function)],
                2 if function in PAIRS else 1,
            )
    return names


def _of_function(cases: list[Case], together: int) -> list[str]:
    """Hopper kernels have sizes of their own, so their cases stand alone; of the portable ones,
    which other tests have too, a few do.
    """
    hopper = [case for case in cases if is_hopper(case)]
    portable = [case for case in cases if not is_hopper(case)]
    return cover(hopper, together) + cover(portable, 1 if hopper else together)


def of_one_dtype(case: Case) -> bool:
    """Whether a case's dtype is the one that its kernels are looked at with."""
    wanted = HOPPER_DTYPE if is_hopper(case) else PORTABLE_DTYPE
    return case.values.get("dtype", wanted) == wanted


def shard(names: list[str], text: str) -> list[str]:
    """ "2/5": the second of five parts, dealt out in turn, so that the cases of a long function
    go to several.
    """
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ValueError(f"{text!r}: expected NUMBER/COUNT like 2/5")
    return names[int(number) - 1 :: int(count)]
