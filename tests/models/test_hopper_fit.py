"""Which models the Hopper kernels take, and that an exact engine refuses the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from photon_ext.engine.parts import check_exact
from photon_ext.errors import ConfigError
from photon_ext.models import hopper_fit
from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.hopper_fit import hopper_misfit, linears_misfit

CONFIG = ModelConfig(Family.QWEN3, 192, 2, 6, 2, 64, 320, 203)
CPU = torch.device("cpu")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device runs the Hopper kernels."""
    monkeypatch.setattr(hopper_fit, "hopper_runs", lambda: True)


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("changes", "misfit"),
    [
        ({}, None),
        ({"hidden": 200}, "hidden is 200, not a multiple of 64 up to 16384"),
        ({"hidden": 16448}, "hidden is 16448, not a multiple of 64 up to 16384"),
        ({"intermediate": 100}, "intermediate is 100, not a multiple of 64"),
        ({"q_heads": 7, "kv_heads": 1, "head_dim": 96}, "q_size is 672, not a multiple of 64"),
    ],
)
def test_models_whose_linears_fit(changes: dict[str, int], misfit: str | None) -> None:
    config = replace(CONFIG, **changes)
    assert linears_misfit(config, torch.bfloat16, CPU) == misfit
    assert hopper_misfit(config, torch.bfloat16, CPU) == misfit


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("changes", "misfit"),
    [
        ({"head_dim": 32}, "head_dim is 32, none of 64, 96, 128, 256"),
        (
            {"q_heads": 65, "kv_heads": 1},
            "65 query heads share 1 KV heads, more than 64 each",
        ),
    ],
)
def test_attention_takes_fewer_models(changes: dict[str, int], misfit: str) -> None:
    config = replace(CONFIG, **changes)
    assert linears_misfit(config, torch.bfloat16, CPU) is None
    assert hopper_misfit(config, torch.bfloat16, CPU) == misfit


@pytest.mark.usefixtures("runs")
def test_an_exact_engine_refuses_what_would_run_portable_kernels_here_and_there() -> None:
    check_exact(CONFIG, torch.bfloat16, CPU)
    told = (
        "the Hopper kernels do not take all of the model on cpu: the weights are torch.float32, "
        'not torch.bfloat16; pass backend="portable"'
    )
    with pytest.raises(ConfigError, match=told):
        check_exact(CONFIG, torch.float32, CPU)


def test_an_exact_engine_refuses_hopper_kernels_on_another_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hopper_fit, "hopper_runs", lambda: False)
    with pytest.raises(ConfigError, match="the device does not run the Hopper kernels"):
        check_exact(CONFIG, torch.bfloat16, CPU)


@pytest.mark.gpu
def test_an_engine_asks_before_it_is_made() -> None:
    from photon_ext.engine import Engine
    from photon_ext.models.weights import random_weights

    weights = random_weights(CONFIG, torch.float32, "cuda")
    with pytest.raises(ConfigError, match=r'not torch\.bfloat16; pass backend="portable"'):
        Engine.from_weights(CONFIG, weights, exact=True, backend="hopper")
    with Engine.from_weights(CONFIG, weights, exact=True, max_len=64, max_rows=2) as engine:
        assert engine.generate([[1, 2, 3]])[0].token_ids
