"""The schemes of four bits that a `quantization_config` may name, and clear errors for others."""

from __future__ import annotations

import re
from typing import Any

import pytest

from photon_ext.errors import ModelError
from photon_ext.models.loading.config_reader import ConfigReader
from photon_ext.models.loading.int4_config import Int4Scheme, Layout, int4_scheme
from tests.models.stored_int4 import awq, compressed, gptq


def read(config: dict[str, Any]) -> Int4Scheme:
    return int4_scheme(ConfigReader(config, "a/config.json"), "a/config.json")


@pytest.mark.parametrize(
    ("config", "layout", "group", "zeros"),
    [
        (gptq(), Layout.GPTQ, 128, False),
        (gptq(sym=False, group_size=32), Layout.GPTQ, 32, True),
        (gptq(group_size=-1, checkpoint_format="gptq"), Layout.GPTQ, None, False),
        (gptq(checkpoint_format="gptq_v2", sym=False), Layout.GPTQ_V2, 128, True),
        (gptq(format="gptq_v2", dynamic={}, pack_dtype="int32"), Layout.GPTQ_V2, 128, False),
        (gptq(format="gptq_v2", checkpoint_format="GPTQ"), Layout.GPTQ, 128, False),
        (awq(), Layout.AWQ, 128, True),
        (awq(version="GEMM", group_size=64), Layout.AWQ, 64, True),
        (awq(group_size=-1, zero_point=False), Layout.AWQ, None, False),
        (compressed(), Layout.COMPRESSED, 128, False),
        (compressed(group_size=32, symmetric=False), Layout.COMPRESSED, 32, True),
        (compressed(strategy="channel", group_size=None), Layout.COMPRESSED, None, False),
        (compressed(strategy="channel", group_size=-1), Layout.COMPRESSED, None, False),
        # columns were quantized in another order, and stored in their own
        (compressed(actorder="static"), Layout.COMPRESSED, 128, False),
        (compressed(actorder="weight"), Layout.COMPRESSED, 128, False),
        (compressed(fields={"sparsity_config": {"format": "dense"}}), Layout.COMPRESSED, 128, 0),
    ],
)
def test_schemes_are_read(
    config: dict[str, Any], layout: Layout, group: int | None, zeros: bool
) -> None:
    found = read(config)
    assert (found.layout, found.group, found.zeros) == (layout, group, zeros)


def test_a_scheme_says_what_it_is() -> None:
    assert str(read(gptq())) == "int4 weights, scales one for 128 columns of a row"
    asymmetric = read(awq(group_size=-1))
    assert str(asymmetric) == "int4 weights, scales one a row, with zero points"


HEAD, QUERY, UP = "lm_head", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"
ELEVENTH, GATE = "model.layers.11.mlp.up_proj", "model.layers.1.mlp.gate_proj"
MODULES = [HEAD, QUERY, UP, GATE, ELEVENTH]


@pytest.mark.parametrize(
    ("config", "left_out"),
    [
        (gptq(), [HEAD]),
        (gptq(lm_head=False), [HEAD]),
        (gptq(lm_head=True), []),
        (awq(), [HEAD]),
        (awq(modules_to_not_convert=[]), [HEAD]),
        (awq(modules_to_not_convert=[QUERY]), [HEAD, QUERY]),
        (awq(modules_to_not_convert=["self_attn", "visual"]), [HEAD, QUERY]),
        (awq(modules_to_not_convert=["up_proj"]), [HEAD, UP, ELEVENTH]),
        (awq(modules_to_not_convert=["model.layers.1"]), [HEAD, QUERY, UP, GATE]),
        # a part of a name is none: the router of experts is not the projection
        (awq(modules_to_not_convert=["mlp.gate"]), [HEAD]),
        (compressed(), [HEAD]),
        (compressed([]), []),
        (compressed([UP, "down_proj"]), [UP]),
        (compressed(["re:.*mlp.*", "lm_head"]), [HEAD, UP, GATE, ELEVENTH]),
        (compressed(["re:mlp.*"]), []),
    ],
)
def test_hazard_c7_modules_are_left_out_as_each_scheme_names_them(
    config: dict[str, Any], left_out: list[str]
) -> None:
    patterns = read(config).left_out
    assert [one for one in MODULES if any(re.fullmatch(p, one) for p in patterns)] == left_out


GROUPS = compressed()["config_groups"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes'"),
        ({}, "quant_method None"),
        (gptq(bits=8), "gptq with bits 8"),
        (gptq(bits=None), "gptq with bits None"),
        (gptq(desc_act=True), r"gptq with desc_act true .*made with desc_act false\)"),
        (gptq(checkpoint_format="marlin"), "gptq with checkpoint_format 'marlin'"),
        (gptq(format="gptq_p"), "gptq with checkpoint_format 'gptq_p'"),
        (gptq(is_marlin_format=True), "gptq with is_marlin_format true"),
        (gptq(pack_dtype="int64"), "gptq with pack_dtype 'int64'"),
        (gptq(dynamic={"-:.*mlp.*": {}}), "gptq with dynamic .*mlp"),
        (
            gptq(modules_in_block_to_quantize=[["self_attn.q_proj"]]),
            "gptq with modules_in_block_to_quantize .*q_proj",
        ),
        (gptq(group_size=100), "int4 weights with group_size 100"),
        (gptq(group_size=16), "int4 weights with group_size 16"),
        (gptq(group_size=0), "int4 weights with group_size 0"),
        (gptq(group_size=-32), "int4 weights with group_size -32"),
        (gptq(group_size=None), "int4 weights with group_size None"),
        (gptq(group_size="128"), "int4 weights with group_size '128'"),
        (gptq(group_size=True), "int4 weights with group_size True"),
        (awq(bits=3), "awq with bits 3"),
        (awq(version="gemv"), "awq with version 'gemv'"),
        (awq(version=None, format="gemv_fast"), "awq with version 'gemv_fast'"),
        (awq(dynamic={"a": {"bits": 8}}), "awq with dynamic"),
        (awq(group_size=48), "int4 weights with group_size 48"),
        (compressed(num_bits=8), "format 'pack-quantized' and weights of type 'int' of 8 bits"),
        (compressed(type="float"), "weights of type 'float' of 4 bits"),
        (compressed(fields={"format": "nvfp4-pack-quantized"}), "format 'nvfp4-pack-quantized'"),
        (compressed(strategy="tensor"), "4 bits with strategy 'tensor'"),
        (compressed(strategy=None), "4 bits with strategy None"),
        (compressed(actorder="group"), r"actorder 'group' .*made with actorder \"static\""),
        (compressed(actorder="dynamic"), "actorder 'dynamic'"),
        (compressed(actorder=True), "actorder True"),
        (compressed(group_size=16), "int4 weights with group_size 16"),
        (
            compressed(fields={"kv_cache_scheme": {"num_bits": 8}}),
            "with a kv_cache_scheme of another type",
        ),
        (compressed(fields={"transform_config": {"a": 1}}), "with transform_config"),
        (compressed(fields={"sparsity_config": {"format": "x"}}), "with sparsity_config"),
        (compressed(fields={"config_groups": {}}), r"config_groups \[\], more or less than one"),
        (
            compressed(fields={"config_groups": {**GROUPS, "group_1": {}}}),
            "config_groups .*group_1",
        ),
        (
            compressed(fields={"config_groups": {"g": {"targets": ["Linear"]}}}),
            "without weights in g",
        ),
        (
            compressed(fields={"config_groups": {"g": {**GROUPS["group_0"], "targets": ["re:a"]}}}),
            r"with targets \['re:a'\]",
        ),
    ],
)
def test_other_schemes_are_refused_by_name_with_what_can_be_read(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=rf"^a/config\.json: .*{message}.*readable are .*awq"):
        read(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (gptq(sym="yes"), "sym is 'yes', expected true or false"),
        (gptq(desc_act=1), "desc_act is 1, expected true or false"),
        (gptq(lm_head="no"), "lm_head is 'no', expected true or false"),
        (gptq(checkpoint_format=2), "checkpoint_format is 2, expected a text"),
        (awq(zero_point=[]), r"zero_point is \[\], expected true or false"),
        (awq(modules_to_not_convert="lm_head"), "modules_to_not_convert is 'lm_head', .* a list"),
        (awq(modules_to_not_convert=[1]), r"modules_to_not_convert is \[1\], .* a list of names"),
        (awq(modules_to_not_convert=["("]), r"modules_to_not_convert comes to .* no regular"),
        (compressed(["re:("]), "ignore comes to .* no regular expression"),
        (compressed(symmetric="no"), "symmetric is 'no', expected true or false"),
    ],
)
def test_damaged_values_are_refused_where_they_stand(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=rf"^a/config\.json: .*{message}.*the file is damaged"):
        read(config)
