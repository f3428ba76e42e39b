"""Quality of weight formats: the measures by hand, logits of a text, and what a format changes."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import quality
from benchmarks.common.divergence import divergence, perplexity
from benchmarks.common.formats import FORMATS, in_format
from benchmarks.common.logits import text_logits
from benchmarks.common.models import TINY
from benchmarks.common.options import some_of
from benchmarks.common.result import BenchmarkError, read_runs
from photon_ext.dequantize import dequantized
from photon_ext.errors import ConfigError, ModelError
from photon_ext.models.weights import (
    DecoderWeights,
    check_weights,
    random_weights,
    weight_modules,
    weight_slots,
    without_ids,
)
from tests.conftest import skip_without_smollm2

IDS = [(11 * i + i // 7) % TINY.vocab for i in range(50)]
TINY_LONG, CPU = replace(TINY, max_positions=4096), torch.device("cpu")
ROW = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log()


@pytest.fixture
def weights() -> DecoderWeights:
    """Of TINY, so large that tokens matter."""
    made = random_weights(TINY, torch.float32)
    for name, slot in weight_slots(made):
        if not name.endswith("norm.weight"):
            slot.mul_(8)
    return made


# --- measures -------------------------------------------------------------------------------------


def test_equal_logits_do_not_diverge() -> None:
    logits = torch.randn(150, 40, generator=torch.Generator().manual_seed(3))
    assert divergence(logits, logits.clone()) == {"kl": {"mean": 0.0, "p99": 0.0}, "top1": 1.0}


def test_a_divergence_that_is_computed_by_hand() -> None:
    """Of (1/2, 1/2) from (1/4, 3/4), in both directions; the last two rows are equal."""
    forth = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    back = 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)
    expected, found = ROW[[0, 1, 1, 1]], ROW[[1, 0, 1, 1]] + 5.0
    measured = divergence(expected, found)
    assert measured["kl"]["mean"] == pytest.approx((forth + back) / 4, rel=1e-6)
    assert back < measured["kl"]["p99"] < forth
    assert measured["top1"] == 0.5


def test_the_99th_percentile_is_that_of_tokens() -> None:
    expected, found = ROW[[1] * 201], ROW[[0] * 2 + [1] * 199]
    one = 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)
    assert divergence(expected, found)["kl"]["p99"] == 0
    found[2] = ROW[0]
    assert divergence(expected, found)["kl"]["p99"] == pytest.approx(one, rel=1e-6)


def test_tokens_that_never_come_add_nothing() -> None:
    never = torch.full((2, 1), -torch.inf)
    measured = divergence(torch.cat((ROW, never), 1), torch.cat((ROW, never), 1))
    assert measured["kl"] == {"mean": 0.0, "p99": 0.0}


def test_logits_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(BenchmarkError, match=r"\[2, 2\] and \[1, 2\] are not of the same text"):
        divergence(ROW, ROW[:1])
    with pytest.raises(BenchmarkError, match="token 1 are not numbers"):
        divergence(ROW, torch.tensor([[0.0, 0.0], [torch.nan, 0.0]]))


def test_the_perplexity_of_equal_chances_is_their_number() -> None:
    assert perplexity(torch.zeros(200, 131), [7 * i % 131 for i in range(200)]) == pytest.approx(
        131
    )


def test_each_token_is_foretold_by_the_ones_before_it() -> None:
    """1/4, then 1/2; what follows the last one is not known."""
    logits = torch.stack((ROW[1], ROW[0], torch.tensor([-torch.inf, 0.0])))
    assert perplexity(logits, [1, 0, 0]) == pytest.approx(math.sqrt(8))
    sure = torch.full((4, 9), -torch.inf).scatter(1, torch.tensor([[1], [2], [3], [4]]), 0.0)
    assert perplexity(sure, [0, 1, 2, 3]) == 1


# --- logits of a text -----------------------------------------------------------------------------


def test_logits_of_a_text_are_those_of_transformers(weights: DecoderWeights) -> None:
    pytest.importorskip("transformers")
    from benchmarks.common.checkpoint import transformers_model

    with torch.no_grad():
        expected = transformers_model(TINY, weights)(torch.tensor([IDS])).logits[0]
    assert float(expected.std()) > 0.5
    torch.testing.assert_close(text_logits(TINY, weights, IDS), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 49, 50, 300])
def test_logits_of_a_text_do_not_depend_on_its_steps(
    chunk: int, weights: DecoderWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.common.logits.HEAD", 16)
    whole = text_logits(TINY, weights, IDS)
    parts = text_logits(TINY, weights, IDS, chunk)
    assert parts.dtype is torch.float32
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)


def test_a_text_that_is_too_long_is_refused(weights: DecoderWeights) -> None:
    with pytest.raises(ConfigError, match="max_len is 50 and the model was made for 49 positions"):
        text_logits(replace(TINY, max_positions=49), weights, IDS)


# --- formats --------------------------------------------------------------------------------------


def test_a_format_in_a_dtype_is_all_of_the_model_in_it(weights: DecoderWeights) -> None:
    weights = without_ids(weights, [5])
    config, made = in_format("bfloat16", TINY, weights)
    assert (config, made.tied) == (TINY, True)
    pairs = zip(weights.tensors(), made.tensors(), strict=True)
    assert all(torch.equal(before.bfloat16(), after) for before, after in pairs)
    assert in_format("float32", TINY, weights).weights is weights


@pytest.mark.parametrize(("form", "most"), [("fp8", 2.0**-4), ("int4", 0.5)])
def test_a_rounded_format_is_stored_so_and_near(
    form: str, most: float, weights: DecoderWeights
) -> None:
    """The head, which is the table of embeddings, in fp8."""
    config, made = in_format(form, TINY, weights)
    check_weights(config, made)
    formats = {weight.format.value for _, weight in weight_modules(made)}
    assert formats == {"fp8", form}
    assert made.tied
    pairs = zip(weight_modules(weights), weight_modules(made), strict=True)
    for (_, before), (_, after) in pairs:
        error = (dequantized(after) - before.data).abs()
        assert bool((error <= most * before.data.abs().amax(1, keepdim=True)).all())


def test_fewer_bits_are_further_off(weights: DecoderWeights) -> None:
    expected = text_logits(TINY, weights, IDS)
    means = [
        divergence(expected, text_logits(*in_format(form, TINY, weights), IDS))
        for form in ("float32", "bfloat16", "fp8", "int4")
    ]
    found = [one["kl"]["mean"] for one in means]
    assert found[0] == 0
    assert 0 < 4 * found[1] < 2 * found[2] < found[3]


def test_keys_and_values_in_fp8_change_less_than_weights_in_fp8(weights: DecoderWeights) -> None:
    expected = text_logits(TINY, weights, IDS)
    found = text_logits(TINY, weights, IDS, kv_dtype="fp8")
    rounded = text_logits(*in_format("fp8", TINY, weights), IDS)
    means = [divergence(expected, one)["kl"]["mean"] for one in (found, rounded)]
    assert 0 < means[0] < means[1]


# --- the command ----------------------------------------------------------------------------------


def test_the_text_is_of_the_length_that_figures_name() -> None:
    skip_without_smollm2()
    ids = quality.text_ids("smollm2", TINY_LONG, quality.TEXT, None, CPU)
    assert len(ids) == 2357
    assert quality.text_ids("smollm2", TINY_LONG, quality.TEXT, 100, CPU) == ids[:100]
    short = replace(TINY_LONG, max_positions=64)
    assert quality.text_ids("smollm2", short, quality.TEXT, None, CPU) == ids[:64]


def test_a_text_of_one_token_is_refused(tmp_path: Path) -> None:
    skip_without_smollm2()
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(BenchmarkError, match=r"a\.txt has 1 tokens of smollm2; give 2 or more"):
        quality.text_ids("smollm2", TINY_LONG, tmp_path / "a.txt", None, CPU)


def test_a_format_that_cannot_be_made_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise ModelError("a number that is not finite")

    path = tmp_path / "r.jsonl"
    monkeypatch.setattr("photon_ext.models.loading.placing.int4_groups", refuse)
    given = f"--model tiny --device cpu --tokens 20 --formats int4,fp8 --no-speed --json {path}"
    assert quality.main(given.split()) == 1
    (run,) = read_runs(path)
    assert [(entry["format"], entry["status"]) for entry in run["entries"]] == [
        ("float32", "ok"),
        ("int4", "failed"),
        ("fp8", "ok"),
    ]
    assert run["entries"][2]["ms_per_step"] is None


def test_keys_and_values_of_formats_may_be_in_fp8(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    given = "--model tiny --device cpu --tokens 20 --formats float32 --kv-dtype fp8 --no-speed"
    assert quality.main([*given.split(), "--json", str(path)]) == 0
    (run,) = read_runs(path)
    assert [entry["format"] for entry in run["entries"]] == ["float32", "float32, fp8 kv"]
    assert run["entries"][1]["kl"]["mean"] > 0


@pytest.mark.parametrize("given", ["--formats bfloat16,int4", "--formats fp8 --chunk 8"])
def test_activations_that_nothing_rounds_are_refused(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        quality.main(["--model", "tiny", "--activations", "fp8", *given.split()])
    assert "--activations fp8: " in capsys.readouterr().err


def test_a_cpu_has_the_loss_of_tokens_in_fp8(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    given = "--model tiny --device cpu --tokens 40 --formats fp8 --no-speed"
    assert quality.main([*given.split(), "--json", str(path)]) == 0
    assert quality.main([*given.split(), "--activations", "fp8", "--json", str(path)]) == 0
    plain, rounded = (run["entries"][-1] for run in read_runs(path))
    assert (plain["format"], rounded["format"]) == ("fp8", "fp8, fp8 activations")
    assert 0 < plain["kl"]["mean"] != rounded["kl"]["mean"]


def test_options_that_name_nothing_are_refused(tmp_path: Path) -> None:
    formats = some_of(FORMATS)
    assert formats(",".join(FORMATS)) == list(FORMATS)
    with pytest.raises(ArgumentTypeError, match="'int3' is unknown; give some of bfloat16, "):
        formats("fp8,int3")
    with pytest.raises(ArgumentTypeError, match=r"none\.txt' cannot be read as text"):
        quality.text_file(str(tmp_path / "none.txt"))
