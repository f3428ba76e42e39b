"""What callers hand in may raise, return or call anything: it costs them their request, and
nobody else theirs.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator

import pytest

import photon_ext
from photon_ext.engine import Engine, Request
from photon_ext.engine.request_options import RequestOptions
from photon_ext.errors import ConfigError, EngineDeadError, RequestError, describe
from photon_ext.runtime import Pipeline, Row, RowParams
from photon_ext.sampling import SamplingParams
from photon_ext.testing import SimRuntime, ToyForward
from tests.engine.byte_tokenizer import VOCAB, byte_tokenizer
from tests.engine.simulated import WatchedDevice, engine_on, expected_tokens
from tests.engine.tiny import CONFIG, WEIGHTS
from tests.forked import run_script

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


class Panic(BaseException):
    """What pyo3 raises for a panic in Rust derives from BaseException as well."""


class Unspeakable(BaseException):
    def __str__(self) -> str:
        raise Panic("no text either")


class Scripted:
    """A constraint that allows everything, and calls `act` with the name of each method that is
    called.
    """

    def __init__(self, act: Callable[[str], object]) -> None:
        self.act = act

    @property
    def finished(self) -> bool:
        self.act("finished")
        return False

    def advance(self, token: int) -> None:
        self.act("advance")

    def fill_bitmask(self, words: memoryview) -> None:
        self.act("fill_bitmask")
        words[:] = memoryview(b"\xff" * words.nbytes).cast("i")


def engine_of(depth: int = 2) -> Engine:
    return engine_on(WatchedDevice(depth=depth), tokenizer=byte_tokenizer())


@pytest.fixture(params=[1, 2])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Serves on after whatever the test does to it."""
    with engine_of(request.param) as made:
        yield made
        assert list(
            made.generate([[1, 2, 3]], SamplingParams(max_new_tokens=5))[0].token_ids
        ) == expected_tokens([1, 2, 3], 5, VOCAB)


def serve(engine: Engine, act: Callable[[str], object]) -> Request:
    """A request with a constraint, ended, beside one without."""
    other = engine.submit([4, 5], SamplingParams(max_new_tokens=9))
    request = engine.submit([1], SamplingParams(max_new_tokens=3, constraint=Scripted(act)))
    request.result(20)
    assert list(other.result(20).token_ids) == expected_tokens([4, 5], 9, VOCAB)
    return request


@pytest.mark.parametrize("where", ["fill_bitmask", "advance", "finished"])
@pytest.mark.parametrize(
    "kind",
    [Panic, Unspeakable, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError],
    ids=lambda kind: kind.__name__,
)
def test_whatever_a_constraint_raises_ends_its_own_request_only(
    engine: Engine, where: str, kind: type[BaseException]
) -> None:
    def act(called: str) -> None:
        if called == where:
            raise kind

    output = serve(engine, act).result()
    assert output.finish_reason == "error"
    assert kind.__name__ in (output.error or "")


class Slotted(Scripted):
    """Where `finished` is, no class says: only an object of it has it, and there it is a method."""

    __slots__ = ("finished",)

    def __init__(self) -> None:
        super().__init__(lambda called: None)
        self.finished = lambda: False


def test_a_constraint_whose_finished_turns_out_to_be_a_method_ends_with_an_error(
    engine: Engine,
) -> None:
    output = engine.submit([1], SamplingParams(max_new_tokens=3, constraint=Slotted())).result(20)
    assert output.finish_reason == "error"
    assert "which always counts as true; make it a property" in (output.error or "")


@pytest.mark.parametrize("stop", [(), "never"], ids=["the reader's text", "the loop's text"])
@pytest.mark.parametrize("where", ["push", "flush"])
@pytest.mark.parametrize("kind", [Panic, Unspeakable, UnicodeError], ids=lambda kind: kind.__name__)
def test_whatever_a_detokenizer_raises_ends_its_own_request_only(
    engine: Engine, where: str, kind: type[BaseException], stop: str
) -> None:
    class Failing:
        def push(self, token: int) -> str:
            if where == "push":
                raise kind
            return ""

        def flush(self) -> str:
            raise kind

    detokenizer, engine.tokenizer.detokenizer = engine.tokenizer.detokenizer, Failing
    output = engine.submit([1], SamplingParams(max_new_tokens=4, stop=stop)).result(20)
    engine.tokenizer.detokenizer = detokenizer
    assert output.finish_reason == "error"
    assert kind.__name__ in (output.error or "")


def test_a_reader_that_cannot_be_woken_is_left_alone(engine: Engine) -> None:
    def wake() -> None:
        raise Panic

    go_on = threading.Event()
    request = engine.submit(
        [1], SamplingParams(max_new_tokens=3, constraint=Scripted(lambda called: go_on.wait(20)))
    )
    request._wakers.add(wake)
    go_on.set()
    assert request.result(20).finish_reason == "length"


def test_a_crash_without_a_text_is_told_by_its_type() -> None:
    device = WatchedDevice()

    def crash() -> None:
        raise Unspeakable

    device.on_step = crash
    engine = engine_on(device)
    assert "Unspeakable" in (engine.submit([1]).result(20).error or "")
    with pytest.raises(EngineDeadError, match="Unspeakable"):
        engine.submit([1])
    assert describe(Unspeakable()) == "Unspeakable (whose text cannot be made)"
    assert describe(ValueError("no\n  such\ttoken")) == "ValueError: no such token"


def test_without_an_engine_an_interrupt_of_the_main_thread_stays_one() -> None:
    """Python raises it wherever the main thread happens to be, be it in a mask callback; the
    step can be finalized after it.
    """
    runtime = SimRuntime(page_size=4)
    pipe = Pipeline(runtime, ToyForward(runtime), vocab_size=32)
    row = pipe.admit([1], RowParams(max_new_tokens=2, constrained=True), pages=[1])

    def fail(error: BaseException) -> Callable[[Row, memoryview], None]:
        def fill(row: Row, words: memoryview) -> None:
            raise error

        return fill

    with pytest.raises(KeyboardInterrupt):
        pipe.tick(fail(KeyboardInterrupt()))
    pipe.finalize(fail(Unspeakable()))
    (event,) = pipe.commit()
    assert event.row is row
    assert (
        event.error
        == "the constraint raised at position 0: Unspeakable (whose text cannot be made)"
    )


# --- fresh() and the protocol ---------------------------------------------------------------------


class MethodFinished(Scripted):
    def __init__(self) -> None:
        super().__init__(lambda called: None)

    def finished(self) -> bool:
        return False


class Fresh(Scripted):
    """`made` is what fresh() returns, or raises."""

    def __init__(self, made: object) -> None:
        super().__init__(lambda called: None)
        self.made = made

    def fresh(self) -> object:
        if isinstance(self.made, BaseException):
            raise self.made
        return self.made


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, "returned None; it must return a constraint"),
        (5, "returned a int"),
        (Scripted, "returned a type"),
        (
            MethodFinished(),
            "returned a MethodFinished; it must return a constraint: its finished is a method",
        ),
        (ValueError("no start"), "raised ValueError: no start"),
        (Panic("rust"), "raised Panic: rust"),
        (Unspeakable(), "raised Unspeakable"),
    ],
)
def test_a_request_is_never_served_without_the_constraint_it_asked_for(
    engine: Engine, made: object, message: str
) -> None:
    params = SamplingParams(max_new_tokens=3, constraint=Fresh(made))
    with pytest.raises(RequestError, match=message):
        engine.submit([1], params)
    with pytest.raises(RequestError, match=f"prompt 1: .*{message}"):
        engine.generate([[1], [2]], [SamplingParams(), params])


def test_an_interrupt_of_the_caller_in_fresh_stays_one(engine: Engine) -> None:
    with pytest.raises(KeyboardInterrupt):
        engine.submit([1], SamplingParams(constraint=Fresh(KeyboardInterrupt())))


# --- calls from the engine's own thread -----------------------------------------------------------


def waits(engine: Engine) -> dict[str, Callable[[], object]]:
    async def read(request: Request) -> None:
        async for _ in request.stream():
            pass

    return {
        "generate": lambda: engine.generate([[1]]),
        "result": lambda: engine.submit([1]).result(),
        "result in time": lambda: engine.submit([1]).result(5),
        "iter": lambda: list(engine.submit([1]).iter()),
        "stream": lambda: asyncio.run(read(engine.submit([1]))),
    }


@pytest.mark.parametrize("call", sorted(waits(None)))
def test_a_constraint_that_waits_for_its_own_engine_is_refused(engine: Engine, call: str) -> None:
    output = serve(engine, lambda called: waits(engine)[call]()).result()
    assert output.finish_reason == "error"
    assert "RequestError: a constraint, which runs on the engine's own thread, cannot wait" in (
        output.error or ""
    )


def test_a_constraint_may_use_what_needs_no_wait(engine: Engine) -> None:
    submitted: list[Request] = []
    done = engine.submit([7], SamplingParams(max_new_tokens=2))
    done.result(20)

    def act(called: str) -> None:
        submitted.append(engine.submit([1, 2], SamplingParams(max_new_tokens=2)))
        assert done.result().token_ids
        assert list(done.iter())

    assert serve(engine, act).result().finish_reason == "length"
    assert all(
        list(request.result(20).token_ids) == expected_tokens([1, 2], 2, VOCAB)
        for request in submitted
    )


def test_a_constraint_may_wait_for_another_engine(engine: Engine) -> None:
    with engine_of() as other:
        assert (
            serve(engine, lambda called: other.generate([[1]], SamplingParams(max_new_tokens=2)))
            .result()
            .finish_reason
            == "length"
        )


@DEPTHS
def test_a_constraint_that_closes_its_engine_does_not_wait_for_itself(depth: int) -> None:
    engine = engine_of(depth)
    request = engine.submit(
        [1], SamplingParams(max_new_tokens=30, constraint=Scripted(lambda called: engine.close()))
    )
    assert request.result(20).finish_reason == "cancelled"
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    with pytest.raises(EngineDeadError, match="closed"):
        engine.submit([1])


@pytest.mark.parametrize("crash", [False, True])
def test_a_thread_with_the_number_of_an_ended_engine_thread_is_not_taken_for_it(
    crash: bool,
) -> None:
    """The system gives numbers again; here the test's own thread was the engine's before."""
    device = WatchedDevice()
    engine = engine_on(device)
    if crash:

        def fail() -> None:
            raise OSError("the device is gone")

        device.on_step = fail
        engine._queue.post([engine._input.make([1], None, False, RequestOptions())])
    else:
        engine.close()
    engine._loop.run()
    for call in (lambda: engine.generate([[1]]), lambda: engine.submit([1])):
        with pytest.raises(
            EngineDeadError, match="the device is gone" if crash else "the engine is closed"
        ):
            call()
    assert not engine._queue.owned


# --- fork -----------------------------------------------------------------------------------------

FORK = """
import os, sys
import torch
from photon_ext.engine import Engine
from photon_ext.errors import EngineDeadError
from photon_ext.sampling import SamplingParams
from tests.engine.tiny import CONFIG, WEIGHTS

torch.set_num_threads(2)
torch.zeros(3_000_000).cos()  # by two threads: the second is not there after a fork
engine = Engine.from_weights(CONFIG, WEIGHTS, max_rows=2, max_len=200, buckets=(1, 2))
served = engine.submit([1, 2], SamplingParams(max_new_tokens=2))
running = engine.submit([3], SamplingParams(max_new_tokens=190))
served.result()
child = os.fork()
if child == 0:
    calls = {
        "generate": lambda: engine.generate([[1]]),
        "submit": lambda: engine.submit([1]),
        # before anything whose lock another thread may have held
        "form": lambda: engine.submit([1], SamplingParams(regex="ab")),
        "chat": lambda: engine.chat([{"role": "user", "content": "Hello"}]),
    }
    if not running.done:
        calls["result"] = running.result
        calls["iter"] = lambda: next(running.iter()) and list(running.iter())
    for name, call in calls.items():
        try:
            call()
        except EngineDeadError as error:
            remedy = "use a fresh process instead (multiprocessing's 'spawn'), or call "
            assert remedy + "torch.set_num_threads(1)" in str(error), error
            assert str(error).endswith("here and then make a new Engine"), error
        else:
            raise AssertionError(name)
    assert len(served.result().token_ids) == 2
    running.cancel()
    engine.stats()
    torch.set_num_threads(1)  # the advice
    torch.zeros(3_000_000).cos()
    with Engine.from_weights(CONFIG, WEIGHTS, max_rows=2, max_len=200, buckets=(1, 2)) as own:
        output = own.generate([[1, 2]], SamplingParams(max_new_tokens=2))[0]
    assert (output.token_ids, output.error) == (served.result().token_ids, None)
    sys.exit(7)  # a normal end: atexit, finalizers
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
reason = running.result().finish_reason
assert reason in ("length", "stop"), "the child's calls are nothing to the parent"
print(code, len(engine.generate([[1, 2]], SamplingParams(max_new_tokens=2))[0].token_ids))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_in_a_forked_process_the_engine_says_so_and_what_it_advises_works() -> None:
    done = run_script(FORK)
    assert (done.returncode, done.stdout.split()) == (0, ["7", "2"]), done.stderr


# --- options --------------------------------------------------------------------------------------


def test_a_model_with_many_end_tokens_gets_room_for_them() -> None:
    ends = tuple(range(100, 120))
    with Engine.from_weights(
        CONFIG.with_eos(*ends), WEIGHTS, max_rows=1, max_len=40, max_stop_ids=4
    ) as engine:
        assert engine.generate([[1]], SamplingParams(max_new_tokens=2))[0].token_ids
        with pytest.raises(RequestError, match=r"21 stop token ids.*20 at most \(max_stop_ids\)"):
            engine.submit([1], SamplingParams(stop_token_ids=(5,)))


def test_the_number_of_stop_ids_has_a_bound() -> None:
    with pytest.raises(ConfigError, match="max_stop_ids is 4097; give an integer from 1 to 4096"):
        Engine.from_weights(CONFIG, WEIGHTS, max_stop_ids=4097)


@pytest.mark.parametrize(
    "prompt", [b"ab", bytearray(b"ab"), memoryview(b"ab")], ids=lambda prompt: type(prompt).__name__
)
def test_bytes_are_no_token_ids(engine: Engine, prompt: object) -> None:
    with pytest.raises(
        RequestError, match=f"the prompt is a {type(prompt).__name__}; give a string"
    ):
        engine.submit(prompt)
    with pytest.raises(ConfigError, match=f"prompts is a {type(prompt).__name__}"):
        engine.generate(prompt)


@pytest.mark.parametrize(
    ("text", "which"), [("ab\udcff", "DCFF"), ("ab\ud83d\ude42", "D83D")], ids=["lone", "pair"]
)
def test_a_surrogate_is_refused(engine: Engine, text: str, which: str) -> None:
    with pytest.raises(
        RequestError,
        match=rf"the prompt holds a surrogate, U\+{which}, at character 2; give valid Unicode text",
    ):
        engine.submit(text)


def test_everything_that_the_package_names_is_there() -> None:
    assert all(getattr(photon_ext, name) is not None for name in photon_ext.__all__)
