"""A decode step in plain PyTorch over a static cache, compiled, in the manner of gpt-fast (PyTorch
blog, "Accelerating Generative AI with PyTorch II"): one layer is compiled for all of them, and the
step is a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common.result import BenchmarkError
from benchmarks.engines import peer
from photon_ext.models.config import ModelConfig
from photon_ext.models.layers.block import Block
from photon_ext.models.loading.loader import load_model
from photon_ext.models.rope import rope_tables
from photon_ext.models.weights import DecoderWeights

# tokens [batch, n] and positions [n] to the next token of each row [batch, 1]
Step = Callable[[Tensor, Tensor], Tensor]

MULTIPLE = 8  # the cache's length


class Parts(NamedTuple):
    """What a step is made of: the functions below, or what torch.compile makes of them."""

    begin: Callable[..., Any]
    layer: Callable[..., Any]
    end: Callable[..., Any]


class StaticDecoder(nn.Module):
    """A Llama or Qwen3 decoder with keys and values [batch, kv heads, length, head_dim] per layer.

    Args:
        config, weights: the model.
        batch, length: of the cache; `length` counts prompt and new tokens.
    """

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, batch: int, length: int
    ) -> None:
        super().__init__()
        if config.attention_scale is not None or config.unrotated:
            told = "layers without rotation, or with a scale of attention of their own"
            raise BenchmarkError(f"a {config.family.value} model has {told}; take another family")
        self.config, shape = config, (batch, config.kv_heads, length, config.head_dim)
        self.layers = nn.ModuleList(_Layer(config, each, shape) for each in weights.layers)
        cos, sin = rope_tables(config, length, weights.device)
        mask = torch.ones(length, length, dtype=torch.bool, device=weights.device).tril()
        fixed = {"cos": cos, "sin": sin, "mask": mask, "lm_head": weights.head.weight.data}
        _hold(self, {**fixed, "embedding": weights.embedding.data, "norm": weights.head.norm})

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.run(EAGER, tokens, positions)

    def run(self, parts: Parts, tokens: Tensor, positions: Tensor) -> Tensor:
        """The next token of each row, [batch, 1], after `tokens` [batch, n] at `positions` [n]."""
        x, delta, place = parts.begin(self, tokens, positions)
        for layer in self.layers:
            x, delta = parts.layer(layer, x, delta, place)
        token: Tensor = parts.end(self, x, delta)
        return token


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer: Block, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.config = config
        attention, projections = layer.attention, layer.projections()
        like = attention.qkv.weight.data
        _hold(self, {name: like.new_zeros(shape) for name in CACHES})
        _hold(self, {"q_norm": attention.q_norm, "k_norm": attention.k_norm})
        _hold(self, {"input_norm": attention.qkv.norm, "post_norm": layer.mlp.gate_up.norm})
        for name, projection in projections.items():
            _hold(self, {name: projection.weight.data, f"{name}_bias": projection.bias})

    def norm(self, name: str, x: Tensor) -> Tensor:
        return _norm(x, self.get_buffer(name), self.config.rms_eps)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, getattr(self, name), getattr(self, f"{name}_bias"))

    def attend(
        self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, mask: Tensor
    ) -> Tensor:
        """`mask` [n, length]: the places that each token sees."""
        config, keys, values = self.config, *(self.get_buffer(name) for name in CACHES)
        heads = self.linear("qkv", x).unflatten(-1, (-1, config.head_dim))
        q, k, v = heads.split([config.q_heads, config.kv_heads, config.kv_heads], dim=2)
        if config.qk_norm:
            q, k = self.norm("q_norm", q), self.norm("k_norm", k)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        keys.index_copy_(2, positions, k.transpose(1, 2))
        values.index_copy_(2, positions, v.transpose(1, 2))
        return _attention(q.transpose(1, 2), keys, values, mask).transpose(1, 2).flatten(2)


CACHES = ("keys", "values")


def _begin(decoder: StaticDecoder, tokens: Tensor, positions: Tensor) -> tuple[Any, ...]:
    """The residual, what is still to be added to it, and positions with the tables' rows."""
    x = F.embedding(tokens, decoder.get_buffer("embedding"))
    tables = (decoder.get_buffer(name)[positions] for name in ("cos", "sin", "mask"))
    return x, torch.zeros_like(x), (positions, *tables)


def _layer(
    layer: _Layer, x: Tensor, delta: Tensor, place: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """The last sum is left to the next layer, so that one compiled alone fuses it with the norm,
    as the whole step does."""
    x = x + delta
    x = x + layer.linear("o", layer.attend(layer.norm("input_norm", x), *place))
    gate, up = layer.linear("gate_up", layer.norm("post_norm", x)).chunk(2, dim=-1)
    return x, layer.linear("down", F.silu(gate) * up)


def _end(decoder: StaticDecoder, x: Tensor, delta: Tensor) -> Tensor:
    last = _norm((x + delta)[:, -1:], decoder.get_buffer("norm"), decoder.config.rms_eps)
    return F.linear(last, decoder.get_buffer("lm_head")).argmax(-1)


EAGER = Parts(_begin, _layer, _end)


def _attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """q [batch, heads, n, head_dim]. The rows of a group go through one product, so that keys and
    values are read once and not repeated."""
    n, scale = q.shape[2], q.shape[-1] ** -0.5
    grouped = q.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
    scores = (grouped @ keys.transpose(-2, -1)).unflatten(2, (-1, n)).float() * scale
    shares = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(q.dtype)
    return (shares.flatten(2, 3) @ values).unflatten(2, (-1, n)).flatten(1, 2)


def _hold(module: nn.Module, tensors: Mapping[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor, persistent=False)


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
    """The loop around it: prefill as it stands, decode steps compiled; nothing waits for the device
    but the ends of the window."""

    method = peer.BY_LOOP
    mode = "one process, torch.compile(fullgraph=True) of a layer, the step in a CUDA graph"

    def __init__(self, setup: peer.Setup, compiles: bool = True) -> None:
        self.version = f"torch {torch.__version__}"
        self._device, self._compiles, self._seconds = setup.device, compiles, setup.seconds
        loaded = load_model(setup.directory, setup.dtype, setup.device)
        self._config, self._weights = loaded.config, loaded.weights

    @torch.no_grad()
    def measure(self, prompts: peer.Prompts, window: peer.Window) -> peer.Measured:
        length = -(-(window.prompt + window.last) // MULTIPLE) * MULTIPLE
        decoder = StaticDecoder(self._config, self._weights, len(prompts), length)
        step = self._step(decoder, len(prompts)) if self._compiles else decoder
        self._run(decoder, step, prompts, window)  # what has not been compiled and captured yet
        runs: list[tuple[float, peer.Tokens]] = []
        begin = time.perf_counter()
        while not runs or (
            len(runs) < peer.REPEATS and time.perf_counter() - begin < self._seconds
        ):
            runs.append(self._run(decoder, step, prompts, window))
        times = [ms for ms, _ in runs]
        torch._dynamo.reset()
        return peer.Measured(
            median(times), (min(times), max(times)), len(runs), runs[-1][1], window
        )

    def close(self) -> None:
        del self._weights

    def _step(self, decoder: StaticDecoder, batch: int) -> Step:
        parts = Parts(*(torch.compile(part, fullgraph=True, dynamic=False) for part in EAGER))

        def step(tokens: Tensor, positions: Tensor) -> Tensor:
            return decoder.run(parts, tokens, positions)

        return _captured(step, batch) if self._device == "cuda" else step

    def _run(
        self, decoder: StaticDecoder, step: Step, prompts: peer.Prompts, window: peer.Window
    ) -> tuple[float, peer.Tokens]:
        """Milliseconds per step in the window, and the tokens."""
        prompt = torch.tensor(prompts, device=self._device)
        last = decoder(prompt, torch.arange(window.prompt, device=self._device))
        position = torch.tensor([window.prompt], device=self._device)
        made = [last]
        begin = 0.0
        while len(made) < window.last:
            if len(made) == window.first:
                peer.synchronize(self._device)
                begin = time.perf_counter()
            last = step(last, position).clone()
            position += 1
            made.append(last)
        peer.synchronize(self._device)
        ms = (time.perf_counter() - begin) * 1e3 / (window.last - window.first)
        tokens: peer.Tokens = torch.cat(made, dim=1).tolist()
        peer.check_tokens(tokens, window.last)
        return ms, tokens


def _captured(step: Step, batch: int) -> Step:
    """A step as a CUDA graph. Its keys and values of position 0 are written before there is a
    prompt."""
    options: dict[str, Any] = {"dtype": torch.int64, "device": "cuda"}
    tokens, positions = torch.zeros(batch, 1, **options), torch.zeros(1, **options)
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
