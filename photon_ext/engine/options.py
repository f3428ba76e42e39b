"""The settings of an engine, checked before anything is loaded or allocated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from photon_ext.checks import (
    Activations,
    Backend,
    KvDtype,
    Prefill,
    check_activations,
    check_backend,
    check_count,
    check_counts,
    check_depth,
    check_flag,
    check_kv_dtype,
    check_prefill,
)
from photon_ext.errors import ConfigError, shown
from photon_ext.models.kernel_plan import KernelPlan, check_not_exact

if TYPE_CHECKING:
    from photon_ext.scheduling import Policy

MAX_STOP_IDS = 4096  # the device looks through all of a row's for each token
MAX_BIASES = 300  # logit biases of a request
MAX_AUTOMATA_MIB = 4096  # more words than int32 offsets reach
MAX_LORA_RANK = 512


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is built for. ConfigError: a value is out of range.

    Attributes:
        max_rows: requests that run at once; more wait. None: 32 on a CPU; on a GPU as many as its
            memory has room for with 1,024 tokens each, up to 256.
        max_waiting: requests that may wait besides max_rows that run, 0 or more; one more is
            refused with QueueFull. None: any number.
        policy: the order in which requests get rows; where pages run out, the last in it leaves:
            "first-come", "shortest-prompt", "priority" (the highest first; 30 s of waiting count as
            a priority higher by 1), or an object of your own (see scheduling.policy).
        max_len: tokens of a request, prompt and answer but for the answer's last, which is not fed;
            None: what the model was made for, up to 4096. A window of the model's attention limits
            it. A model with LongRoPE (Phi-4-mini) rotates texts within its first context otherwise
            than longer ones: here max_len chooses for all requests, at load, and transformers by
            the length of each text. So beyond that context (4096) short texts get other logits.
        depth: steps in flight: 2 overlaps the host's work with the device's, 1 is the blocking
            loop.
        page_size: tokens per KV page.
        num_pages: KV pages; None: max_rows requests of max_len tokens, cut to what 0.9 of a GPU's
            free memory holds, or half of a CPU's.
        kv_dtype: "fp8" stores keys and values as e4m3 numbers, with a float32 scale for each token
            and KV head: the same memory has nearly twice the pages of a bfloat16 model, and answers
            differ a little. On a GPU the Hopper kernel of decode rows reads them, and chunk
            attention of prompts. None: they have the dtype of the model.
        activations: "fp8" has linears whose weights are stored in fp8 read tokens that are rounded
            to fp8, each with a scale of its own, in steps of 9 to 256 tokens (from 33 on where some
            linears of layers are not in fp8, or from 17 where few columns share a scale), and in
            longer ones where each row of the weight has one scale. Such steps take less time, and
            answers differ a little, also by how many tokens a step has. Steps with adapters (LoRA)
            round none up to 64 tokens, and of scales of blocks none at all. For Hopper GPUs and
            bfloat16, and not with `exact`. None: linears read the dtype of the model.
        chunk: prompt tokens per step at most. None: 2,048 on a GPU, or the largest of its halves
            that fits there; else 256.
        prefill: "mixed": every step has all decode rows. Beside them are as many prompt tokens as
            keep the step within twice the time that the decode rows take alone; that is
            measured. The smallest of several prefill buckets, or else 64 tokens, may always be
            there, and more that take hardly longer. The step may take 2.5 times as long as its
            decode rows alone where each prompt token then delays them less, and while rows have
            more than two chunks left of their prompts; while they have more than 16, or are more
            than those that decode, all of `chunk` is there, however long the step takes.
            "separate": prefill and decode steps take turns. With `exact` the answers are the same.
            None: "mixed" where prefill steps are captured; else "separate".
        max_tokens_per_step: tokens of a step that has prompt tokens, decode rows included. Decode
            rows are always there, and beside them the smallest number of prompt tokens that
            `prefill` names. None: `chunk` prompt tokens beside any decode rows.
        buckets: numbers of rows that decode graphs are captured for; max_rows is added. None: 1, 8,
            16, 32, ... doubled up to max_rows. Start-up captures three graphs for each of them and
            each slot.
        prefill_buckets: numbers of prompt tokens that prefill graphs are captured for. Unless
            `prefill` is "separate", mixed steps are captured, too, for each of them beside each of
            `buckets`. Other chunks run eagerly. None: on a CPU one of `chunk` tokens; on a GPU 64,
            128, 256, ... doubled up to `chunk`.
        graph: capture steps into graphs, or run them eagerly.
        exact: keep a request's tokens bit for bit independent of the traffic on CUDA as well, as
            they are on the CPU: of what else runs, of chunks, depth, cached prompts and
            preemptions. Its price: from 33 tokens on (17 where few columns of a weight share a
            scale) linears keep one order of sums, which is slower than those for a batch and than
            torch's matrix products, and so does attention of as many rows; attention of prompts is
            dealt out less evenly, and not at all, by a kernel that sums in another order, where
            keys and values are fp8, heads have other than 64 or 128 dims, page_size is no multiple
            of 16, or a step may have more than 4,096 tokens; of cached pages only those of prompts
            are shared, not those of answers; and a preempted request generates its answer again up
            to where it was.
        backend: "hopper" runs the kernels made for Hopper where they fit (bfloat16, compute
            capability 9.0; 10.0 only where :func:`photon_ext.hopper_runs` says so), but in the
            layers of steps of more than 128 tokens (256 with layers of up to 32 Mi weights, 64 on
            10.0) without `exact`, and attends in prefill by matrix instructions (bfloat16, 8.0 or
            newer); without `exact` prompts, and more than 32 rows that decode, by kernels whose
            bits depend on the step. "portable" runs the others. The two sum in different orders,
            and what `exact` promises holds with each of them; with `exact` hopper is refused where
            it does not take the whole model. None: hopper where the device runs it and the model is
            bfloat16.
        kernel_plan: which kernels run, as models.kernel_plan.plan_kernels makes it and
            dataclasses.replace changes it; then leave out `exact`, `backend` and `activations`.
            None: the plan that these choose.
        prefix_cache: a prompt that begins as an earlier prompt or conversation finds its keys and
            values in cached pages. These give way to whatever else needs pages.
        max_stop_ids: stop ids of a request, the model's end tokens included, up to 4096; raised to
            their number where a model has more.
        lora_slots: adapters (LoRA) that running requests may have at a time; others take turns.
            Steps in which a row has one are captured besides, so that start-up takes twice as long.
        lora_rank: the largest rank of an adapter, up to 512.
        penalties: requests may have penalties: takes 4 bytes for each row and id of the vocabulary.
        automata_mib: memory for constraints that the device keeps, in MiB: those of json_schema,
            regex and choice that are small enough; 0: the host keeps all. None: 64 on a GPU, else
            16. Where it is full of constraints of requests that run, others wait.
        automata_dir: a folder, made where it is missing, in which such constraints are kept for
            engines that come later: 256 MiB; the least recently used go first. None: they
            are compiled by each engine anew.
        embeds_tokens: embeddings that prompts may bring along, of all requests together whose
            prompts are being read; takes the memory of as many activations. 0: prompts are tokens
            alone.
        timing: measure step gaps, by two events around each step.
        meter: keep the counts that need a clock or an event (see observe.meter).
        freeze: keep what start-up made from garbage collections (see Engine).
        blocking: the wait for a step spins for a while (1 ms on CUDA, less on the host), then
            yields the CPU; False spins on.
    """

    max_rows: int | None = None
    max_waiting: int | None = None
    policy: str | Policy = "first-come"
    max_len: int | None = None
    depth: int = 2
    page_size: int = 16
    num_pages: int | None = None
    kv_dtype: KvDtype | None = None
    activations: Activations | None = None
    chunk: int | None = None
    prefill: Prefill | None = None
    max_tokens_per_step: int | None = None
    buckets: tuple[int, ...] | None = None
    prefill_buckets: tuple[int, ...] | None = None
    graph: bool = True
    exact: bool = False
    backend: Backend | None = None
    kernel_plan: KernelPlan | None = None
    prefix_cache: bool = True
    max_stop_ids: int = 16
    lora_slots: int = 0
    lora_rank: int = 16
    penalties: bool = True
    automata_mib: int | None = None
    automata_dir: str | Path | None = None
    embeds_tokens: int = 0
    timing: bool = True
    meter: bool = True
    freeze: bool = True
    blocking: bool = True

    def __post_init__(self) -> None:
        # not above: who asks for no engine, but for what options there are, needs no torch
        from photon_ext.engine.automaton_folder import made_folder
        from photon_ext.scheduling.policy import choose_policy

        self._settle("page_size", check_count("page_size", self.page_size))
        for name in ("max_rows", "max_len", "num_pages", "chunk", "max_tokens_per_step"):
            if getattr(self, name) is not None:
                self._settle(name, check_count(name, getattr(self, name)))
        if self.max_waiting is not None:
            self._settle("max_waiting", check_count("max_waiting", self.max_waiting, least=0))
        if self.automata_mib is not None:
            most = MAX_AUTOMATA_MIB
            automata_mib = check_count("automata_mib", self.automata_mib, most, least=0)
            self._settle("automata_mib", automata_mib)
        if self.automata_dir is not None:
            self._settle("automata_dir", made_folder(self.automata_dir))
        self._settle("embeds_tokens", check_count("embeds_tokens", self.embeds_tokens, least=0))
        choose_policy(self.policy)
        most = MAX_STOP_IDS
        self._settle("max_stop_ids", check_count("max_stop_ids", self.max_stop_ids, most))
        self._settle("lora_slots", check_count("lora_slots", self.lora_slots, least=0))
        self._settle("lora_rank", check_count("lora_rank", self.lora_rank, MAX_LORA_RANK))
        for name in ("buckets", "prefill_buckets"):
            if getattr(self, name) is not None:
                self._settle(name, check_counts(name, getattr(self, name)))
        for name, value in vars(self).items():
            if isinstance(EngineOptions.__dataclass_fields__[name].default, bool):
                check_flag(name, value)
        check_backend(self.backend)
        check_activations(self.activations)
        if self.activations is not None:
            check_not_exact(self.exact)
        self._check_plan()
        check_prefill(self.prefill)
        check_kv_dtype(self.kv_dtype)
        self._settle("depth", check_depth(self.depth))

    def _check_plan(self) -> None:
        plan = self.kernel_plan
        if plan is not None and not isinstance(plan, KernelPlan):
            raise ConfigError(
                f"kernel_plan is {shown(plan)}; give what models.kernel_plan.plan_kernels returns"
            )
        others: dict[str, object] = {"exact": self.exact or None, "backend": self.backend}
        others["activations"] = self.activations
        given = [f"{name} is {shown(value)}" for name, value in others.items() if value is not None]
        if plan is not None and given:
            raise ConfigError(
                f"kernel_plan is given, and {' and '.join(given)}: that chooses a plan of its own; "
                "leave out kernel_plan, or give these to plan_kernels (which does not ask whether "
                "all steps of an exact model sum alike, see hopper_unsupported)"
            )

    def _settle(self, name: str, value: object) -> None:
        """What was checked, in plain ints: numpy's overflow, and its arrays change in place."""
        object.__setattr__(self, name, value)


def named_options(options: Mapping[str, Any], others: Iterable[str] = ()) -> EngineOptions:
    """Options by name, as keywords of a call that takes `others` besides. Raises ConfigError."""
    known = [*others, *(field.name for field in fields(EngineOptions))]
    for name in options:
        if name not in known:
            nearest = get_close_matches(name, known, n=1)
            remedy = f"did you mean {nearest[0]}? There are" if nearest else "there are"
            raise ConfigError(f"an engine has no option {shown(name)}; {remedy} {', '.join(known)}")
    return EngineOptions(**options)


def choose_device(device: str) -> str:
    """`device`, where "auto" is the GPU if torch sees one that this build has kernels for."""
    if device != "auto":
        return device
    import torch

    from photon_ext import _C

    return "cuda" if _C.cuda_compiled and torch.cuda.is_available() else "cpu"
