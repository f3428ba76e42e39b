"""A decode step in plain PyTorch over a static cache, compiled, after the recipe of gpt-fast
(PyTorch blog, "Accelerating Generative AI with PyTorch II"): as it is there, the whole step with
reduce-overhead and tuned kernels; and, quicker to compile, one layer for all of them and the step
in a CUDA graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.engines.peer import (
    BY_LOOP,
    REPEATS,
    Measured,
    Prompts,
    Setup,
    Tokens,
    Window,
    check_tokens,
    synchronize,
)
from photon_ext.models.config import ModelConfig
from photon_ext.models.loader import load_model
from photon_ext.models.rope import rope_tables
from photon_ext.models.weights import DecoderWeights, LayerWeights

# tokens [batch, n] and positions [n] to the next token of each row [batch, 1]
Step = Callable[[Tensor, Tensor], Tensor]

MULTIPLE = 8  # the cache's length


class Parts(NamedTuple):
    """What a step is made of: the functions below, or what torch.compile makes of them."""

    begin: Callable[..., Any]
    layer: Callable[..., Any]
    end: Callable[..., Any]


class StaticDecoder(nn.Module):
    """A Llama or Qwen3 decoder whose keys and values lie in [batch, kv heads, length, head_dim] per
    layer.

    Args:
        config, weights: the model.
        batch, length: of the cache; `length` counts prompt and new tokens.
        static: tell the compiler that weights and caches stay where they are. Code for one layer
            then fits no other.
    """

    mask: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, batch: int, length: int, static: bool
    ) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(
            _Layer(config, layer, batch, length, static) for layer in weights.layers
        )
        cos, sin = rope_tables(config, length, weights.device)
        fixed = {
            "embedding": weights.embedding,
            "norm": weights.final_norm,
            "lm_head": weights.lm_head,
            "cos": cos,
            "sin": sin,
        }
        _hold(
            self,
            fixed
            | {"mask": torch.ones(length, length, dtype=torch.bool, device=weights.device).tril()},
            static,
        )

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.run(EAGER, tokens, positions)

    def run(self, parts: Parts, tokens: Tensor, positions: Tensor) -> Tensor:
        """The next token of each row, [batch, 1], after `tokens` [batch, n] at `positions` [n]."""
        x, delta, *tables = parts.begin(self, tokens, positions)
        for layer in self.layers:
            x, delta = parts.layer(layer, x, delta, positions, *tables)
        token: Tensor = parts.end(self, x, delta)
        return token


class _Layer(nn.Module):
    keys: Tensor
    values: Tensor
    input_norm: Tensor
    post_norm: Tensor

    def __init__(
        self, config: ModelConfig, weights: LayerWeights, batch: int, length: int, static: bool
    ) -> None:
        super().__init__()
        self.config = config
        shape = (batch, config.kv_heads, length, config.head_dim)
        held = {name: weights.input_norm.new_zeros(shape) for name in ("keys", "values")}
        norms = {
            "input_norm": weights.input_norm,
            "post_norm": weights.post_norm,
            "q_norm": weights.q_norm,
            "k_norm": weights.k_norm,
        }
        _hold(self, held | norms, static)
        for name in ("qkv", "o", "gate_up", "down"):
            linear = getattr(weights, name)
            _hold(self, {name: linear.weight, f"{name}_bias": linear.bias}, static)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, getattr(self, name), getattr(self, f"{name}_bias"))

    def attend(
        self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, mask: Tensor
    ) -> Tensor:
        config = self.config
        heads = self.linear("qkv", x).unflatten(-1, (-1, config.head_dim))
        q, k, v = heads.split([config.q_heads, config.kv_heads, config.kv_heads], dim=2)
        if config.qk_norm:
            q, k = (
                _norm(q, self.get_buffer("q_norm"), config.rms_eps),
                _norm(k, self.get_buffer("k_norm"), config.rms_eps),
            )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        self.keys.index_copy_(2, positions, k.transpose(1, 2))
        self.values.index_copy_(2, positions, v.transpose(1, 2))
        return (
            _attention(q.transpose(1, 2), self.keys, self.values, mask).transpose(1, 2).flatten(2)
        )


def _begin(decoder: StaticDecoder, tokens: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """The residual, what is still to be added to it, and the rows of the tables."""
    x = F.embedding(tokens, decoder.get_buffer("embedding"))
    return (
        x,
        torch.zeros_like(x),
        decoder.cos[positions],
        decoder.sin[positions],
        decoder.mask[positions],
    )


def _layer(
    layer: _Layer,
    x: Tensor,
    delta: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """The last sum is left to the next layer, so that one compiled alone fuses it with the norm,
    as the whole step does.
    """
    x = x + delta
    x = x + layer.linear(
        "o",
        layer.attend(_norm(x, layer.input_norm, layer.config.rms_eps), positions, cos, sin, mask),
    )
    gate, up = layer.linear("gate_up", _norm(x, layer.post_norm, layer.config.rms_eps)).chunk(
        2, dim=-1
    )
    return x, layer.linear("down", F.silu(gate) * up)


def _end(decoder: StaticDecoder, x: Tensor, delta: Tensor) -> Tensor:
    last = _norm((x + delta)[:, -1:], decoder.get_buffer("norm"), decoder.config.rms_eps)
    return F.linear(last, decoder.get_buffer("lm_head")).argmax(-1)


EAGER = Parts(_begin, _layer, _end)


def _attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """q [batch, heads, n, head_dim].

    The rows of a group go through one product, so that keys and values are read once and not
    repeated.
    """
    kv_heads, n = keys.shape[1], q.shape[2]
    grouped = q.unflatten(1, (kv_heads, -1))
    scores = (grouped.flatten(2, 3) @ keys.transpose(-2, -1)).unflatten(
        2, (-1, n)
    ).float() * q.shape[-1] ** -0.5
    shares = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(q.dtype)
    return (shares.flatten(2, 3) @ values).unflatten(2, (-1, n)).flatten(1, 2)


def _hold(module: nn.Module, tensors: Mapping[str, Tensor | None], static: bool) -> None:
    """Buffers; at fixed addresses, which a CUDA graph may read, and for the caches write, where
    they are.
    """
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor, persistent=False)
        if static and tensor is not None:
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
    """The loop around it: prefill as it stands, decode steps compiled; nothing waits for the
    device but the ends of the window.
    """

    method = BY_LOOP
    mode = "one process, torch.compile(fullgraph=True) of a layer, the step in a CUDA graph"
    whole = False

    def __init__(self, setup: Setup, compiles: bool = True) -> None:
        self.version = f"torch {torch.__version__}"
        self._device, self._compiles, self._seconds = setup.device, compiles, setup.seconds
        loaded = load_model(setup.directory, setup.dtype, setup.device)
        self._config, self._weights = loaded.config, loaded.weights

    @torch.no_grad()
    def measure(self, prompts: Prompts, window: Window) -> Measured:
        length = -(-(window.prompt + window.last) // MULTIPLE) * MULTIPLE
        decoder = StaticDecoder(self._config, self._weights, len(prompts), length, self.whole)
        step = self._step(decoder, len(prompts)) if self._compiles else decoder
        self._run(decoder, step, prompts, window)  # what has not been compiled and captured yet
        runs: list[tuple[float, Tokens]] = []
        begin = time.perf_counter()
        while not runs or (len(runs) < REPEATS and time.perf_counter() - begin < self._seconds):
            runs.append(self._run(decoder, step, prompts, window))
        times = [ms for ms, _ in runs]
        torch._dynamo.reset()
        return Measured(median(times), (min(times), max(times)), len(runs), runs[-1][1], window)

    def close(self) -> None:
        del self._weights

    def _step(self, decoder: StaticDecoder, batch: int) -> Step:
        parts = Parts(*(torch.compile(part, fullgraph=True, dynamic=False) for part in EAGER))

        def step(tokens: Tensor, positions: Tensor) -> Tensor:
            return decoder.run(parts, tokens, positions)

        return _captured(step, batch) if self._device == "cuda" else step

    def _run(
        self, decoder: StaticDecoder, step: Step, prompts: Prompts, window: Window
    ) -> tuple[float, Tokens]:
        """Milliseconds per step in the window, and the tokens."""
        prompt = torch.tensor(prompts, device=self._device)
        last = decoder(prompt, torch.arange(window.prompt, device=self._device))
        position = torch.tensor([window.prompt], device=self._device)
        made = [last]
        begin = 0.0
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


class TunedCompiled(Compiled):
    """gpt-fast's own settings; tuning compiles each kernel dozens of times."""

    mode = (
        "one process, torch.compile(fullgraph=True) of the step, as mode='reduce-overhead' and "
        "with coordinate_descent_tuning"
    )
    whole = True

    def _step(self, decoder: StaticDecoder, batch: int) -> Step:
        step: Step = torch.compile(
            decoder,
            fullgraph=True,
            options={"triton.cudagraphs": True, "coordinate_descent_tuning": True},
        )
        return step


def _captured(step: Step, batch: int) -> Step:
    """A step as a CUDA graph.

    Its keys and values of position 0 are written before there is a prompt.
    """
    tokens, positions = (
        torch.zeros(batch, 1, dtype=torch.int64, device="cuda"),
        torch.zeros(1, dtype=torch.int64, device="cuda"),
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and lets libraries allocate what they need
        for _ in range(2):
            step(tokens, positions)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(tokens, positions)

    def replay(given: Tensor, at: Tensor) -> Tensor:
        tokens.copy_(given)
        positions.copy_(at)
        graph.replay()
        return out

    return replay
