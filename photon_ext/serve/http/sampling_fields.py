"""SamplingFields: what requests of all endpoints may ask of their tokens."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from photon_ext.checks import INT32_MAX
from photon_ext.sampling.params import SamplingParams
from photon_ext.serve.http.errors import bad_request
from photon_ext.serve.http.fields import Fields, Many, NotTaken, row_field

MOST_ANSWERS = 128
_SEEDS = 2**64
_LEAST_TOP_P = 1e-6  # 0 is the likeliest token alone, as is this


class StreamOptions(Fields):
    """
    Attributes:
        include_usage: a last event has the usage of all.
        continuous_usage_stats: each event has that so far.
    """

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: Annotated[Any, NotTaken(False)] = None


class SamplingFields(Fields):
    """Fields of OpenAI's requests, and behind them those of this engine."""

    model: str | None = Field(default=None, description="The model, or an adapter of it.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MOST_ANSWERS, description="Answers to a prompt.")
    max_tokens: int | None = Field(
        default=None, ge=0, le=INT32_MAX, description="0: one is run, and not shown."
    )
    temperature: float | None = row_field("temperature")
    top_p: float | None = row_field("top_p", least=0)
    seed: int | None = Field(default=None, ge=-(2**63), le=_SEEDS - 1)
    stop: str | Many[str] | None = None
    presence_penalty: float | None = row_field("presence_penalty")
    frequency_penalty: float | None = row_field("frequency_penalty")
    logit_bias: dict[str, float] | None = None
    user: str | None = Field(default=None, description="Of no effect.")
    store: Annotated[Any, NotTaken(False, instead="nothing is stored here: leave it out")] = None

    top_k: int | None = row_field("top_k", least=-1)
    min_p: float | None = row_field("min_p")
    min_tokens: int | None = row_field("min_tokens")
    repetition_penalty: float | None = row_field("repetition_penalty")
    stop_token_ids: Many[int] | None = None
    include_stop_str_in_output: bool | None = False
    bad_words: Many[str] | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    prompt_logprobs: int | None = row_field("prompt_logprobs")
    priority: int | None = Field(default=None, ge=-INT32_MAX, le=INT32_MAX)
    timeout_s: float | None = Field(default=None, ge=0)
    cache_salt: str | None = None
    length_penalty: Annotated[Any, NotTaken(1.0)] = None
    use_beam_search: Annotated[Any, NotTaken(False)] = None
    spaces_between_special_tokens: Annotated[Any, NotTaken(True)] = None

    def check_stream(self) -> None:
        """Raises ApiError: a field goes with `stream` alone, or not with it."""
        if self.stream and self.prompt_logprobs is not None:
            raise bad_request(
                "prompt_logprobs come with whole answers, and stream is true; leave one out",
                "prompt_logprobs",
            )
        if self.stream_options is not None and not self.stream:
            raise bad_request(
                "stream_options are given and stream is not true; set it, or leave them out",
                "stream_options",
            )

    @property
    def answers(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None or self.stop == "":
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def own_params(self) -> dict[str, Any]:
        """Keywords of SamplingParams that were given, but for what only some endpoints have."""
        same = (
            "temperature",
            "presence_penalty",
            "frequency_penalty",
            "min_p",
            "min_tokens",
            "repetition_penalty",
            "stop_token_ids",
            "bad_words",
            "prompt_logprobs",
        )
        given = {name: getattr(self, name) for name in same}
        given["temperature"] = 1.0 if self.temperature is None else self.temperature
        given["top_k"] = None if self.top_k is None else max(self.top_k, 0)
        given["top_p"] = None if self.top_p is None else max(self.top_p, _LEAST_TOP_P)
        given["seed"] = None if self.seed is None else self.seed % _SEEDS
        given["ignore_eos"] = self.ignore_eos or None
        if self.logit_bias:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        return {name: value for name, value in given.items() if value is not None}


def checked_params(params: dict[str, Any], fields: SamplingFields) -> SamplingParams:
    """The parameters as the engine will make them, with the stop strings, which it never sees.

    Raises ConfigError: a value is not allowed.
    """
    include = bool(fields.include_stop_str_in_output)
    return SamplingParams(**params, stop=fields.stops, include_stop=include)


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 11):
        raise bad_request(
            f"logit_bias has the key {key[:50]!r}; give token ids, such as '50256'", "logit_bias"
        )
    return int(key)
