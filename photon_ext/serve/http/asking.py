"""From the fields of a request to what the engine is asked, for all endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from photon_ext.checks import check_ids
from photon_ext.errors import RequestError
from photon_ext.serve.contract import Ask, ModelCard
from photon_ext.serve.http.answer import AnswerRules
from photon_ext.serve.http.errors import bad_request
from photon_ext.serve.http.sampling_fields import SamplingFields, checked_params


def make_asks(
    prompts: Sequence[tuple[int, ...]],
    fields: SamplingFields,
    special: Mapping[str, Any],
    cap: int | None,
    adapter: str | None,
    card: ModelCard,
) -> tuple[list[Ask], AnswerRules]:
    """An ask for each prompt, and what their answers have in common.

    Args:
        special: keywords of SamplingParams beside those that all endpoints have.
        cap: the most tokens of an answer; None: what the context holds.

    Raises ConfigError, RequestError: a value is not allowed.
    """
    given: dict[str, Any] = {"max_new_tokens": None if cap is None else max(cap, 1)}
    given |= {**fields.own_params(), **special}
    checked = checked_params(given, fields)
    own_stops = checked.stop_token_ids
    _check_ids("stop_token_ids", own_stops, card)
    _check_ids("logit_bias", [token for token, _ in checked.biases], card)
    for prompt in prompts:
        if not prompt:
            raise bad_request("prompt is empty; give a text, or token ids", "prompt")
        _check_ids("prompt", prompt, card)
    asks = [
        Ask(
            ids=prompt,
            params=given,
            n=fields.answers,
            priority=fields.priority or 0,
            timeout_s=fields.timeout_s,
            cache_salt=fields.cache_salt,
            adapter=adapter,
        )
        for prompt in prompts
    ]
    ends = () if checked.ignore_eos else card.eos_ids
    rules = AnswerRules(
        stops=checked.stop_automaton,
        stop_ids=frozenset((*ends, *own_stops)),
        asked_ids=frozenset(own_stops),
        include_stop=checked.include_stop,
        hides_all=cap == 0,
    )
    return asks, rules


def _check_ids(name: str, ids: Sequence[int], card: ModelCard) -> None:
    check_ids(name, ids, card.vocab_size, RequestError)
