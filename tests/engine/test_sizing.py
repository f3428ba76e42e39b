"""How many pages an engine gets out of the memory there is."""

from dataclasses import replace
from enum import Enum

import pytest
import torch

from photon_ext.checks import KvDtype
from photon_ext.engine import sizing
from photon_ext.engine.options import EngineOptions
from photon_ext.engine.parts import make_model
from photon_ext.engine.sizing import EngineSize, size_engine
from photon_ext.errors import ConfigError
from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.decoder import Decoder
from photon_ext.models.kernel_plan import (
    BATCH_TOKENS,
    FUSED_TOKENS,
    ExecutionModes,
    KernelPlan,
    plan_for,
)
from photon_ext.models.lora import LoraShape
from photon_ext.models.region import RegionConfig, RegionHeads
from photon_ext.models.shapes import NAMED_SHAPES
from photon_ext.models.weights import random_weights

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    family=Family.LLAMA,
    hidden=32,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=64,
    vocab=100,
    max_positions=512,
)
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, head_dim, float32


HEADS = 2 * 2 * 2  # of a token: keys and values, layers, heads


def size(
    monkeypatch: pytest.MonkeyPatch,
    memory: int,
    device: torch.device = CPU,
    region: RegionConfig | None = None,
    **options: object,
) -> EngineSize:
    monkeypatch.setattr(sizing, "_usable_bytes", lambda device: memory)
    chosen = EngineOptions(**{"automata_mib": 0, **options})
    return size_engine(chosen, CONFIG, torch.float32, device, KernelPlan(), region)


def test_with_enough_memory_every_row_can_be_full(monkeypatch: pytest.MonkeyPatch) -> None:
    result = size(monkeypatch, 2**30, max_rows=4, max_len=100, page_size=16, chunk=64)
    # beside more than one decode row, which ride in a graph for four, there are two chunks at most
    assert result == EngineSize(
        4, 100, 64, None, max_step_tokens=4 + 64, max_segments=6, num_pages=4 * 7, automaton_words=0
    )


@pytest.mark.parametrize(
    ("options", "tokens", "segments"),
    [
        ({"prefill": "separate"}, 64, 33),
        ({"prefill": "mixed", "graph": False}, 33 + 64, 33),
        ({"prefill": "mixed", "prefill_buckets": ()}, 33 + 64, 33),
        ({"graph": False}, 64, 33),
        ({}, 33 + 64, 32 + 16),  # 17 of 33 rows or more decode in a graph for 32
        ({"max_tokens_per_step": 8}, 33 + 64, 32 + 16),
    ],
)
def test_a_step_holds_what_the_engine_plans(
    options: dict[str, object], tokens: int, segments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = size(monkeypatch, 2**30, max_rows=33, chunk=64, **options)
    assert (result.max_step_tokens, result.max_segments) == (tokens, segments)


@pytest.mark.parametrize(
    ("device", "options", "mib"),
    [("cpu", {"automata_mib": None}, 16), ("cuda", {"automata_mib": None}, 64),
     ("cuda", {"automata_mib": 3}, 3), ("cpu", {}, 0)],
)  # fmt: skip
def test_automata_have_memory_of_their_own(
    monkeypatch: pytest.MonkeyPatch, device: str, options: dict[str, object], mib: int
) -> None:
    result = size(monkeypatch, 2**40, torch.device(device), max_rows=4, **options)
    assert 4 * result.automaton_words == mib * 2**20


def test_automata_for_which_there_is_no_memory_can_be_made_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"lower automata_mib$"):
        size(monkeypatch, 2**22, max_rows=4, max_len=64, chunk=8, automata_mib=8)


def test_the_context_is_the_models_own_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert size(monkeypatch, 2**40).max_len == 512


@pytest.mark.parametrize(
    ("device", "memory", "rows"),
    [("cpu", 2**40, 32), ("cuda", 2**40, 256), ("cuda", 100 * 512 * TOKEN_BYTES + 2**19, 100)],
)
def test_rows_are_sized_for_the_device(
    monkeypatch: pytest.MonkeyPatch, device: str, memory: int, rows: int
) -> None:
    result = size(monkeypatch, memory, torch.device(device), chunk=8)
    assert rows <= result.max_rows <= 1.05 * rows
    assert size(monkeypatch, memory, torch.device(device), chunk=8, max_rows=7).max_rows == 7


@pytest.mark.parametrize("mebibytes", [20, 60, 100])
def test_rows_are_as_many_as_have_room_beside_what_they_take(mebibytes: int) -> None:
    """Logits and counts of a large vocabulary take more for each row than its pages do."""
    config = replace(CONFIG, vocab=50_000)
    target = sizing.SizedModel(config, torch.float32, torch.device("cuda"), KernelPlan(), None)
    options, usable = EngineOptions(max_len=512, chunk=64, automata_mib=0), mebibytes * 2**20

    def has_room(rows: int) -> bool:
        pages = target.need(options, rows).fitting(usable)
        return pages * options.page_size // 512 >= rows

    rows = target.default_rows(options, usable)
    assert 1 < rows < sizing.CUDA_ROWS
    assert has_room(rows)
    assert not has_room(rows + 1)


@pytest.mark.parametrize(
    ("device", "options", "chunk", "buckets"),
    [
        ("cpu", {}, 256, None),
        ("cuda", {}, 2048, (64, 128, 256, 512, 1024, 2048)),
        ("cuda", {"chunk": 300}, 300, (64, 128, 256)),
        ("cuda", {"chunk": 40}, 40, ()),
        ("cuda", {"exact": True}, 2048, (64, 128, 256, 512, 1024, 2048)),
        ("cuda", {"prefill_buckets": (8,)}, 2048, (8,)),
    ],
)
def test_steps_with_prompts_are_sized_for_the_device(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    options: dict[str, object],
    chunk: int,
    buckets: tuple[int, ...] | None,
) -> None:
    result = size(monkeypatch, 2**40, torch.device(device), **options)
    assert (result.chunk, result.prefill_buckets) == (chunk, buckets)


def test_a_small_gpu_gets_smaller_chunks_unless_they_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, sizes = torch.device("cuda"), {"max_rows": 4, "max_len": 100}
    chunks = [size(monkeypatch, memory * 2**20, device, **sizes).chunk for memory in (8, 2, 1)]
    assert chunks == [2048, 1024, 512]
    with pytest.raises(ConfigError, match=r"chunk 2048 and .* lower chunk"):
        size(monkeypatch, 2**21, device, chunk=2048, **sizes)
    with pytest.raises(ConfigError, match=r"chunk 2048 and .* lower more than one of max_rows"):
        size(monkeypatch, 2**12, device, **sizes)


def test_less_memory_makes_fewer_pages_that_fit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = 2**20
    result = size(monkeypatch, memory, max_rows=8, max_len=512, page_size=16, chunk=8)
    page_bytes = 16 * TOKEN_BYTES
    assert 512 // 16 <= result.num_pages < 8 * 512 // 16
    assert result.num_pages * page_bytes <= memory


@pytest.mark.parametrize(
    ("options", "message", "remedy"),
    [
        ({"max_rows": 2, "max_len": 512}, "at least 32 pages of 4 KiB", "lower max_len"),
        ({"max_rows": 60, "max_len": 16}, "at least 60 pages", "lower max_rows"),
        (
            {"max_rows": 10, "max_len": 16, "page_size": 64},
            "at least 10 pages of 16 KiB",
            "lower max_rows or page_size",
        ),
        (
            {"max_rows": 60, "max_len": 512},
            "at least 60 pages",
            "lower more than one of max_rows, max_len, chunk, page_size",
        ),
        (
            {"max_rows": 1, "num_pages": 1000, "max_len": 16},
            "at least 1000 pages",
            "lower num_pages",
        ),
        (
            {"max_rows": 1, "max_len": 16, "chunk": 10**6},
            "chunk 1000000 and .* at least 1 pages",
            "lower chunk",
        ),
        (
            {"max_rows": 1, "max_len": 16, "page_size": 10**6},
            "page_size 1000000 need .* at least 1 pages",
            "lower page_size",
        ),
        (
            {"max_rows": 1, "max_len": 16, "embeds_tokens": 10**4},
            "at least 1 pages",
            "lower embeds_tokens",
        ),
    ],
)
def test_hazard_31_what_does_not_fit_says_what_is_needed_what_is_there_and_what_to_lower(
    monkeypatch: pytest.MonkeyPatch, options: dict, message: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        size(monkeypatch, 100_000, **{"chunk": 8, **options})
    assert str(raised.value).endswith(f"0.00 GiB can be used on cpu: {remedy}")


def test_where_nothing_fits_no_option_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match="not even one token fits; free memory there, or take a smaller model"
    ):
        size(monkeypatch, 1000)


def test_memory_of_this_machine_is_found() -> None:
    options = EngineOptions(max_rows=1, max_len=64)
    assert size_engine(options, CONFIG, torch.float32, CPU, KernelPlan()).num_pages == 4


def test_slots_of_adapters_take_their_memory_from_the_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"max_rows": 4, "max_len": 100, "chunk": 8, "prefill": "separate", "penalties": False}
    memory = 2**17 - 2**12  # less than all rows could fill
    plain = size(monkeypatch, memory, **sizes)
    slot = LoraShape(CONFIG, 9).words * 4
    shrunk = 8 * 3 * 16 * 4  # tokens, parts of q/k/v, the rank as it is padded, float32
    needed = 2 * slot + shrunk
    slots = {"lora_slots": 2, "lora_rank": 9}
    assert size(monkeypatch, memory + needed, **slots, **sizes) == plain
    assert size(monkeypatch, memory + needed - 2**12, **slots, **sizes) != plain
    with pytest.raises(ConfigError, match="lower lora_slots"):
        size(monkeypatch, memory, lora_slots=100, lora_rank=9, **sizes)


def storages(part: object, found: dict[int, int]) -> dict[int, int]:
    """Bytes of each memory that tensors of `part` lie in, by its address."""
    if isinstance(part, torch.Tensor):
        if not part.is_meta:
            memory = part.untyped_storage()
            found[memory.data_ptr()] = memory.nbytes()
    elif isinstance(part, dict):
        storages(tuple(part.values()), found)
    elif isinstance(part, (tuple, list)):
        for one in part:
            storages(one, found)
    elif type(part).__module__.startswith("photon_ext") and not isinstance(part, Enum):
        storages(tuple(vars(part).values()), found)
    return found


MODES = ExecutionModes(fused_tokens=FUSED_TOKENS, batch_tokens=BATCH_TOKENS)


@pytest.mark.parametrize(
    "plan",
    [
        KernelPlan(),
        KernelPlan(True, MODES, MODES),
        KernelPlan(True, MODES, MODES, fp8_activations=True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("lora_slots", "kv_dtype"), [(0, None), (2, None), (0, "fp8")])
def test_what_a_decoder_holds_is_what_it_is_sized_for(
    plan: KernelPlan, dtype: torch.dtype, lora_slots: int, kv_dtype: KvDtype | None
) -> None:
    """Besides weights and pages; a layer that rotates and one that does not have two tables."""
    config = replace(CONFIG, unrotated=(1,))
    options = EngineOptions(
        max_rows=4, max_len=100, chunk=8, lora_slots=lora_slots, embeds_tokens=5, kernel_plan=plan,
        penalties=False, automata_mib=0, kv_dtype=kv_dtype,
    )  # fmt: skip
    weights, heads = random_weights(config, dtype), RegionHeads(RegionConfig(32, 32, 8, 12))
    _, decoder, size = make_model(options, config, weights, heads)
    others = weights, decoder._kv
    held = storages(decoder, {}).keys() - storages(others, {}).keys()
    target = sizing.SizedModel(config, dtype, CPU, plan, heads.config)
    needed = target.need(options, size.max_rows).activations
    assert decoder.activation_bytes == needed
    assert sum(storages(decoder, {})[address] for address in held) == needed
    page = target.need(options, size.max_rows).page
    assert decoder.kv_bytes == sum(storages(decoder._kv, {}).values()) == page * size.num_pages


@pytest.mark.parametrize(
    ("dtype", "factor"), [(torch.float32, 256 / 68), (torch.bfloat16, 128 / 68)]
)
def test_fp8_makes_nearly_twice_the_pages_of_bfloat16(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, factor: float
) -> None:
    """A scale of 4 bytes beside each 64 numbers of a byte."""
    config = replace(CONFIG, head_dim=64)
    sizes = {"max_rows": 64, "max_len": 512, "chunk": 8, "automata_mib": 0, "penalties": False}
    plain, fp8 = EngineOptions(**sizes), EngineOptions(**sizes, kv_dtype="fp8")
    target = sizing.SizedModel(config, dtype, CPU, KernelPlan(), None)
    memory = target.need(plain, 64).activations + 2**21
    monkeypatch.setattr(sizing, "_usable_bytes", lambda device: memory)
    pages = [size_engine(one, config, dtype, CPU, KernelPlan()).num_pages for one in (plain, fp8)]
    assert pages[1] == pytest.approx(factor * pages[0], rel=0.01)
    assert pages[1] == 2**21 // (16 * HEADS * (64 + 4))


def test_places_of_embeddings_take_their_memory_from_the_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"max_rows": 4, "max_len": 100, "chunk": 8, "penalties": False}
    memory, plain = 2**20, size(monkeypatch, 2**20, **sizes)
    places = 7 * CONFIG.hidden * 4
    assert size(monkeypatch, memory + places, embeds_tokens=7, **sizes) == plain
    with pytest.raises(ConfigError, match="can be used on cpu: lower embeds_tokens"):
        size(monkeypatch, memory, embeds_tokens=10**6, **sizes)


def test_region_heads_take_their_memory_from_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"max_rows": 4, "max_len": 100, "chunk": 8, "prefill": "separate", "penalties": False}
    memory, region = 2**17 - 2**12, RegionConfig(CONFIG.hidden, 32, 8, 12)
    plain = size(monkeypatch, memory, **sizes)
    assert size(monkeypatch, memory, region=region, **sizes).num_pages < plain.num_pages
    needed = region.step_bytes(plain.max_step_tokens, plain.max_segments, 4)
    assert size(monkeypatch, memory + needed, region=region, **sizes) == plain


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [True, False])
def test_what_a_decoder_takes_on_a_gpu_is_counted(exact: bool) -> None:
    config, device = NAMED_SHAPES["qwen3-0.6b"], torch.device("cuda")
    config = replace(config, layers=1)
    options = EngineOptions(max_rows=256, max_len=4096, chunk=2048, automata_mib=0, exact=exact)
    weights = random_weights(config, torch.bfloat16, device)
    plan = plan_for(config, weights, exact=exact)
    target = sizing.SizedModel(config, torch.bfloat16, device, plan, None)
    tokens, segments = target.step_size(options, 256)
    decoder = Decoder(config, weights, tokens, segments, 4096, 16, 256, plan)
    assert decoder.activation_bytes <= target.need(options, 256).activations
