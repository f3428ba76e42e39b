"""Keys and values that the reference rounds as an fp8 cache does, for tests to compare with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from photon_ext import ops, reference
from photon_ext.layout import Count, Meta


def round_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on what rope_append_kv_ writes into caches of the model's dtype becomes what an fp8
    cache would hold of it. Fused decode does not, nor does what a graph has captured.
    """
    append = ops.rope_append_kv_

    def rounded(*arguments: Any, **named: Any) -> None:
        append(*arguments, **named)
        _, _, _, *caches, meta, page_table = arguments[:7]
        counts = named.get("counts", arguments[12] if len(arguments) > 12 else None)
        own = meta[0 if counts is None else int(counts[Count.DECODE_TOKENS]) :]
        own = own[own[:, Meta.LENGTH] > 0].long()
        positions, page_size = own[:, Meta.POSITION], caches[0].shape[1]
        pages = page_table.long()[own[:, Meta.ROW], positions // page_size]
        for cache in caches:
            if cache.dtype is not torch.float8_e4m3fn:
                place = pages, positions % page_size
                heads = reference.dequantize_heads(*reference.quantize_heads(cache[place]))
                cache[place] = heads.to(cache.dtype)

    monkeypatch.setattr(ops, "rope_append_kv_", rounded)
