"""A request that fits a row, checked whole before anything is taken; on any thread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from photon_ext.checks import (
    Limits,
    check_adjustment,
    check_context,
    check_ids,
    check_stop_ids,
)
from photon_ext.errors import ConfigError, RequestError, shown
from photon_ext.row_params import RowParams


class Admission(NamedTuple):
    """What `Pipeline.admit` takes without looking at it again; the seed is settled.

    Attributes:
        prompt_ids: token ids, and FIRST_EMBED - i for an embedding i that the forward has.
        generated: how many of the last ids of the prompt were sampled before, by a row that had to
            leave: penalties take them for the answer's.
    """

    prompt_ids: tuple[int, ...]
    params: RowParams
    generated: int = 0

    @property
    def answer_begin(self) -> int:
        """Where the answer begins."""
        return len(self.prompt_ids) - self.generated

    @property
    def kv_len(self) -> int:
        """KV entries of the whole sequence; the last token's is never written."""
        return len(self.prompt_ids) + self.params.max_new_tokens - 1


def check_admission(limits: Limits, prompt_ids: Iterable[int], params: RowParams) -> Admission:
    """The request as plain, checked numbers. Raises RequestError where it can never be served,
    ConfigError where `params` are no RowParams.
    """
    if not isinstance(params, RowParams):
        raise ConfigError(f"params is {shown(params)}; give RowParams(...)")
    prompt = check_ids("the prompt", prompt_ids, limits.vocab_size)
    if not prompt:
        raise RequestError(
            "the prompt is empty; give at least one token (a model's beginning-of-text id will do)"
        )
    stops = check_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    check_stop_ids(stops, limits)
    check_ids("logit_bias", [token for token, _ in params.biases], limits.vocab_size)
    check_adjustment(len(params.logit_bias), params.counts_tokens, limits)
    if params.prompt_logprobs is not None and not limits.prompt_logprobs:
        raise RequestError(
            f"prompt_logprobs is {params.prompt_logprobs}, and this forward gives no logits of "
            "prompts; leave it out, or make the pipeline with prompt_logprobs=True"
        )
    if params.object_values and not limits.value_ids:
        raise RequestError(
            f"object_values is {params.object_values}, and this forward gives no values; leave it "
            "out, or make the pipeline with value_ids"
        )
    check_context(len(prompt), params.max_new_tokens, limits.max_len)
    if stops != params.stop_token_ids:
        params = replace(params, stop_token_ids=stops)
    return Admission(prompt, params.settled())
