"""A decode step in plain PyTorch over a static cache, compiled whole, after the recipe of gpt-fast (PyTorch blog, "Accelerating Generative
AI with PyTorch II"): torch.compile, reduce-overhead (CUDA graphs), full graph, attention left to the compiler."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.engines.peer import BY_LOOP, REPEATS, Measured, Prompts, Setup, Tokens, Window, check_tokens, synchronize
from photon_ext.models.config import ModelConfig
from photon_ext.models.loader import load_model
from photon_ext.models.rope import rope_tables
from photon_ext.models.weights import DecoderWeights, LayerWeights

MULTIPLE = 8  # the cache's length


class StaticDecoder(nn.Module):
    """A Llama or Qwen3 decoder whose keys and values lie in [batch, kv heads, length, head_dim] per layer.

    Args:
        config, weights: the model.
        batch, length: of the cache; `length` counts prompt and new tokens.
    """

    mask: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, weights: DecoderWeights, batch: int, length: int) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(_Layer(config, layer, batch, length) for layer in weights.layers)
        cos, sin = rope_tables(config, length, weights.device)
        fixed = {"embedding": weights.embedding, "norm": weights.final_norm, "lm_head": weights.lm_head, "cos": cos, "sin": sin}
        _hold(self, fixed | {"mask": torch.ones(length, length, dtype=torch.bool, device=weights.device).tril()})

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The next token of each row, [batch, 1], after `tokens` [batch, n] at `positions` [n]."""
        x = F.embedding(tokens, self.get_buffer("embedding"))
        cos, sin, mask = self.cos[positions], self.sin[positions], self.mask[positions]
        for layer in self.layers:
            x = layer(x, positions, cos, sin, mask)
        last = _norm(x[:, -1:], self.get_buffer("norm"), self.config.rms_eps)
        return F.linear(last, self.get_buffer("lm_head")).argmax(-1)


class _Layer(nn.Module):
    keys: Tensor
    values: Tensor
    input_norm: Tensor
    post_norm: Tensor

    def __init__(self, config: ModelConfig, weights: LayerWeights, batch: int, length: int) -> None:
        super().__init__()
        self.config = config
        shape = (batch, config.kv_heads, length, config.head_dim)
        _hold(self, {name: weights.input_norm.new_zeros(shape) for name in ("keys", "values")})
        _hold(self, {"input_norm": weights.input_norm, "post_norm": weights.post_norm, "q_norm": weights.q_norm, "k_norm": weights.k_norm})
        for name in ("qkv", "o", "gate_up", "down"):
            linear = getattr(weights, name)
            _hold(self, {name: linear.weight, f"{name}_bias": linear.bias})

    def forward(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self._linear("o", self._attend(_norm(x, self.input_norm, self.config.rms_eps), positions, cos, sin, mask))
        gate, up = self._linear("gate_up", _norm(x, self.post_norm, self.config.rms_eps)).chunk(2, dim=-1)
        return x + self._linear("down", F.silu(gate) * up)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, getattr(self, name), getattr(self, f"{name}_bias"))

    def _attend(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        config = self.config
        heads = self._linear("qkv", x).unflatten(-1, (-1, config.head_dim))
        q, k, v = heads.split([config.q_heads, config.kv_heads, config.kv_heads], dim=2)
        if config.qk_norm:
            q, k = _norm(q, self.get_buffer("q_norm"), config.rms_eps), _norm(k, self.get_buffer("k_norm"), config.rms_eps)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        self.keys.index_copy_(2, positions, k.transpose(1, 2))
        self.values.index_copy_(2, positions, v.transpose(1, 2))
        group = config.q_heads // config.kv_heads
        keys, values = (cache.repeat_interleave(group, dim=1) for cache in (self.keys, self.values))
        attended = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask)
        return attended.transpose(1, 2).flatten(2)


def _hold(module: nn.Module, tensors: Mapping[str, Tensor | None]) -> None:
    """Buffers at fixed addresses, which a CUDA graph may read, and for the caches write, where they are."""
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor, persistent=False)
        if tensor is not None:
            torch._dynamo.mark_static_address(tensor)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, n, heads, head_dim], cos and sin [n, head_dim]."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * cos[:, None] + turned * sin[:, None]).to(x.dtype)


class Compiled:
    """The loop around it: prefill as it stands, decode steps compiled; nothing waits for the device but the ends of the window."""

    method = BY_LOOP
    mode = "one process, torch.compile(mode='reduce-overhead', fullgraph=True)"

    def __init__(self, setup: Setup, compiles: bool = True) -> None:
        self.version = f"torch {torch.__version__}"
        self._device, self._compiles = setup.device, compiles
        loaded = load_model(setup.directory, setup.dtype, setup.device)
        self._config, self._weights = loaded.config, loaded.weights

    @torch.no_grad()
    def measure(self, prompts: Prompts, window: Window) -> Measured:
        length = -(-(window.prompt + window.last) // MULTIPLE) * MULTIPLE
        decoder = StaticDecoder(self._config, self._weights, len(prompts), length)
        step: Any = decoder
        if self._compiles:
            _configure_compiler()
            step = torch.compile(decoder, mode="reduce-overhead", fullgraph=True)
        self._run(decoder, step, prompts, window)  # compiles and captures
        runs = [self._run(decoder, step, prompts, window) for _ in range(REPEATS)]
        times = [ms for ms, _ in runs]
        torch._dynamo.reset()
        return Measured(median(times), (min(times), max(times)), REPEATS, runs[-1][1])

    def close(self) -> None:
        del self._weights

    def _run(self, decoder: StaticDecoder, step: Any, prompts: Prompts, window: Window) -> tuple[float, Tokens]:
        """Milliseconds per step in the window, and the tokens."""
        prompt = torch.tensor(prompts, device=self._device)
        last = decoder(prompt, torch.arange(window.prompt, device=self._device))
        position = torch.tensor([window.prompt], device=self._device)
        made = [last]
        begin = 0.0
        with sdpa_kernel(SDPBackend.MATH):
            while len(made) < window.last:
                if len(made) == window.first:
                    synchronize(self._device)
                    begin = time.perf_counter()
                last = step(last, position).clone()
                position += 1
                made.append(last)
        synchronize(self._device)
        ms = (time.perf_counter() - begin) * 1e3 / (window.last - window.first)
        tokens: Tokens = torch.cat(made, dim=1).tolist()
        check_tokens(tokens, window.last)
        return ms, tokens


def _configure_compiler() -> None:
    """gpt-fast's settings."""
    import torch._inductor.config as inductor

    inductor.coordinate_descent_tuning = True
    inductor.triton.unique_kernel_names = True
    inductor.fx_graph_cache = True
