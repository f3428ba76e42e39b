"""GrammarCompiler: what is compiled, kept and refused, and what a constraint of it allows."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from typing import Any

import jsonschema
import llguidance  # noqa: F401  without it these tests are left out
import pytest

from photon_ext.engine import compiled_grammar, deep_thread
from photon_ext.engine.given_forms import MOST_KEPT
from photon_ext.engine.grammar_compiler import GrammarCompiler
from photon_ext.errors import CompilerBusy, RequestError
from photon_ext.sampling import SamplingParams
from photon_ext.sampling.byte_automaton import AutomatonLimits, ByteAutomaton
from photon_ext.sampling.grammar import Grammar
from photon_ext.sampling.grammar_bounds import MAX_GRAMMAR_CHARACTERS
from photon_ext.sampling.grammar_constraint import GrammarConstraint
from photon_ext.sampling.pattern import NotRegular, Pattern, TooSlow
from tests.engine.byte_tokenizer import VOCAB, byte_tokenizer

EOS = 0  # the byte tokenizer's "!", which no grammar here needs
TOKENIZER = byte_tokenizer()


def asked(**named: Any) -> Grammar:
    grammar = SamplingParams(**named).answer_grammar
    assert grammar is not None
    return grammar


def compiler(vocab_size: int = VOCAB) -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, vocab_size, [EOS])


def mask(constraint: GrammarConstraint, num_words: int = VOCAB // 32) -> set[int]:
    words = memoryview(bytearray(4 * num_words)).cast("i")
    constraint.fill_bitmask(words)
    return {32 * i + bit for i, word in enumerate(words) for bit in range(32) if word >> bit & 1}


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def follow(constraint: GrammarConstraint, text: str) -> None:
    """Takes all of a text, each token of which has to be allowed."""
    for token in ids(text):
        assert not constraint.finished
        assert token in mask(constraint)
        constraint.advance(token)


def accepts(text: str, **named: Any) -> bool:
    """Whether a text is a whole answer: the end token may follow, or nothing may."""
    constraint = compiler().start(asked(**named))
    for token in ids(text):
        if constraint.finished or token not in mask(constraint):
            return False
        constraint.advance(token)
    return constraint.finished or EOS in mask(constraint)


def test_an_answer_is_finished_where_nothing_may_follow() -> None:
    constraint = compiler().start(asked(regex="[a-c]{2}"))
    assert mask(constraint) == {*ids("abc")}
    follow(constraint, "ab")
    assert constraint.finished


def test_the_end_token_is_allowed_where_more_may_follow() -> None:
    constraint = compiler().start(asked(choice=["a", "ab"]))
    follow(constraint, "a")
    assert not constraint.finished
    assert mask(constraint) == {*ids("b"), EOS}
    constraint.advance(EOS)  # of a request with ignore_eos
    assert constraint.finished


@pytest.mark.parametrize("text", ["a.b|c", "(x)", "new\nline", '"\\d/', "né😀", " ", "[^", "a{2}"])
def test_a_choice_is_taken_as_it_stands(text: str) -> None:
    assert accepts(text, choice=["other", text])
    assert not accepts(text + "x", choice=["other", text])


@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [
        (r"\d{2}", "42", "4\u0664"),  # an Arabic-Indic digit
        ("^a/b$", "a/b", "a"),
        ("(?i)yes|no", "YES", "yno"),
        ("a\nb", "a\nb", "anb"),
        (r"[^\d]", "x", "5"),
    ],
)
def test_a_regular_expression_matches_all_of_the_answer(regex: str, good: str, bad: str) -> None:
    assert accepts(good, regex=regex)
    assert not accepts(bad, regex=regex)


def test_json_is_compact_unless_whitespace_is_asked_for() -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    loose = {"json_schema": schema, "whitespace": True}
    assert accepts("[1,2]", json_schema=schema)
    assert not accepts("[1, 2]", json_schema=schema)
    assert accepts("[1, 2]", **loose)
    assert accepts("[\n  1,\n  2\n]", **loose)
    assert not accepts("[" + " " * 17 + "1]", **loose)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"pattern": "^[a-z]+$", "maxLength": 3, "type": "string"}, ['"abc"'], ['"abcd"', '"A"']),
        ({"minLength": 2}, ['"ab"', "5", "null"], ['"a"']),
        ({"maximum": 5}, ["5", '"a"'], ["6"]),
        (
            {
                "type": "object",
                "patternProperties": {"^a": {"type": "integer"}},
                "additionalProperties": False,
            },
            ['{"ab":5}', "{}"],
            ['{"ab":"x"}', '{"b":5}'],
        ),
        ({"type": "string", "pattern": r"^[\x00-\x1f]{2}$"}, [r'"\n\t"'], [r'"\"\""', r'"\\\n"']),
        ({"type": "string", "pattern": '^[^"]*$'}, [r'"a\n\\"'], [r'"\""']),
        ({"type": "string", "pattern": r'^[^"\\]+$'}, [r'"a\u001f\t"'], [r'"\""', r'"\\"']),
    ],
)
def test_hazard_f1_no_part_of_a_schema_is_left_out(
    schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    for text in (*good, *bad):
        assert accepts(text, json_schema=schema) == (text in good)
        valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
        assert valid == (text in good)


def test_hazard_f2_whitespace_alone_does_not_fill_an_answer() -> None:
    schema = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    constraint, written = compiler().start(asked(json_schema=schema, whitespace=True)), 0
    while not constraint.finished:
        allowed = mask(constraint)
        blanks = allowed & {*ids(" \n\t")}
        constraint.advance(min(blanks or allowed - {EOS} or {EOS}))
        written += 1
        assert written < 100


def test_properties_come_in_the_order_of_the_schema() -> None:
    properties = {"b": {"type": "integer"}, "a": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"]}
    assert accepts('{"b":1,"a":2}', json_schema=schema)
    assert not accepts('{"a":2,"b":1}', json_schema=schema)


@pytest.mark.parametrize(
    "text", ['start: NUMBER "+" NUMBER\nNUMBER: /[0-9]+/', 'root ::= num "+" num\nnum ::= [0-9]+']
)
def test_a_grammar_is_written_as_lark_or_as_gbnf(text: str) -> None:
    assert accepts("12+7", grammar=text)
    assert not accepts("12+", grammar=text)


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({"regex": "(a"}, r"^regex '\(a' is refused: .*unclosed group.*; change what is named"),
        ({"regex": r"(a)\1"}, "is refused: .*backreferences are not supported"),
        ({"regex": "(?=a)b"}, "is refused: .*look-ahead.* not supported"),
        ({"regex": r"[^\s\S]"}, "is refused: no text matches it; change"),
        ({"json_schema": {"not": {}}}, r"^json_schema '.*' is refused: Unimplemented keys: ."),
        ({"json_schema": {"format": "x", "type": "string"}}, "is refused: Unknown format: x"),
        ({"json_schema": {"type": "banana"}}, "is refused: Invalid type: banana"),
        ({"json_schema": {"$ref": "http://a/b"}}, "is refused: Resource 'http://a/b' is not pres"),
        ({"json_schema": {"$ref": "file:///etc/hosts"}}, "is refused: Resource 'file:"),
        (
            {"json_schema": {"minimum": 5, "maximum": 3, "type": "integer"}},
            "is refused: Unsatisfiable schema: minimum .5. is greater than maximum .3.",
        ),
        (
            {"json_schema": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
            "is refused: oneOf is served where no value fits two of its schemas; anyOf",
        ),
        ({"json_schema": {"not": {}, "x-guidance": {"lenient": True}}}, "Unimplemented keys"),
        ({"json_schema": '{"title":"\\ud800"}'}, "is refused: ValueError: .*hex escape"),
        ({"grammar": "start: foo"}, "is refused: .*unknown name: .foo."),
        ({"grammar": "yes"}, "^grammar 'yes' is refused: ValueError: .*Expected ::="),
        ({"grammar": '{"grammars": []}'}, "^grammar '.*' is refused: "),
    ],
)
def test_hazard_f5_what_cannot_be_compiled_is_refused_and_the_next_is_served(
    named: Any, told: str
) -> None:
    made = compiler()
    for _ in range(2):  # compiled once, and told each time
        with pytest.raises(RequestError, match=told) as raised:
            made.start(asked(**named))
        assert len(str(raised.value)) < 700
    assert mask(made.start(asked(regex="a"))) == {*ids("a")}


NESTED: dict[str, Any] = {"type": "object"}
for _ in range(300):
    NESTED = {"type": "object", "properties": {"a": NESTED}}


@pytest.mark.parametrize(
    "named",
    [
        {"json_schema": NESTED},
        {"json_schema": {"enum": [f"v{i}" for i in range(6000)]}},
        {"json_schema": {"type": "object", "properties": {f"p{i}": {} for i in range(1500)}}},
        {"json_schema": {"allOf": [{"anyOf": [{"type": "object", "properties": {f"{a}{i}": {
            "type": "string"}}} for a in "pr"]} for i in range(16)]}},
        {"json_schema": {"type": "string", "minLength": 10**5, "maxLength": 10**7}},
        {"regex": "(a+)+b"},
        {"regex": "((a{0,100}){0,100}){0,100}b"},
        {"regex": "(" * 3000 + "a" + ")" * 3000},
        {"regex": "|".join("a" * i for i in range(1, 300)) + "*x"},
        {"regex": r"(\p{L}{1,500}|\p{N}{3,700}|\w{1,900}z)*q"},
        {"json_schema": {"$ref": "#"}},
        {"json_schema": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                         "$ref": "#/$defs/a"}},
        {"json_schema": {"allOf": [{"$ref": "#"}], "type": "object"}},
        {"json_schema": {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}},
        {"json_schema": '{"items":' * 900 + "{}" + "}" * 900},
        {"grammar": "start: s0\n" + "".join(f"s{i}: s{i + 1} s{i + 1}\n" for i in range(30))
            + 's30: "a"'},
        {"grammar": 'start: start start | "b"'},
    ],
)  # fmt: skip
def test_what_is_hostile_takes_bounded_time(named: dict[str, Any]) -> None:
    """Compiled or refused: either is well, where it is soon."""
    grammar, made, begin = asked(**named), compiler(), time.process_time()
    with suppress(RequestError):
        mask(made.start(grammar))
    assert time.process_time() - begin < 10
    assert mask(made.start(asked(regex="a"))) == {*ids("a")}


@pytest.mark.parametrize(
    "named",
    [
        {"regex": "(a{1000}){1000}"},
        {"regex": "(((a{30}){30}){30}){30}"},
        {"regex": "a?" * 3000},
        {"json_schema": {"type": "string", "pattern": "^(a{1000}){1000}$"}},
        {"json_schema": {"oneOf": [{"oneOf": [{"oneOf": [{"const": f"{i}{j}{k}"}
            for k in range(12)]} for j in range(12)]} for i in range(12)]}},
        {"json_schema": {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"type": "integer"}}}
            for i in range(10)]} for j in range(20)]}},
        {"json_schema": {"type": "integer", "multipleOf": 49999}},
        {"json_schema": {"type": "object", "properties": {f"p{i}": {} for i in range(2000)}}},
        {"grammar": "start: A{1000}\nA: /(a{1000}){1000}/"},
        {"grammar": 'start: A\nA: B{1000}\nB: C{1000}\nC: "x"'},
    ],
)  # fmt: skip
def test_hazard_f3_what_is_made_to_take_long_is_compiled_or_refused_soon(
    named: dict[str, Any],
) -> None:
    """Up to 10 s without bounds; 0.3 s with them, of which a slow machine may make more."""
    grammar, made, begin = asked(**named), compiler(), time.process_time()
    with suppress(RequestError):
        constraint = made.start(grammar)
        assert time.process_time() - begin < 3
        assert mask(constraint)
    assert time.process_time() - begin < 3


@pytest.mark.parametrize("regex", ["(a{1000}){1000}", "(((a{30}){30}){30}){30}", "a{1000000}"])
def test_an_automaton_that_gets_too_large_is_refused_in_plain_words(regex: str) -> None:
    told = "^regex '.*' is refused: its regular expressions make too large an automaton; change"
    with pytest.raises(RequestError, match=told):
        compiler().start(asked(regex=regex))


def test_what_fits_into_the_compilations_bound_serves_the_whole_answer() -> None:
    assert accepts("a" * 900, regex="(a{30}){30}")
    assert not accepts("a" * 899, regex="(a{30}){30}")


def chain(link: dict[str, Any], count: int) -> dict[str, Any]:
    """A schema of `count` definitions, each of which leads to the next: DEEPER in `link`."""
    text = json.dumps(link)
    defs = {f"d{i}": json.loads(text.replace("DEEPER", f"#/$defs/d{i + 1}")) for i in range(count)}
    return {"$defs": {**defs, f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "named",
    [
        {"json_schema": chain({"$ref": "DEEPER"}, 1800)},
        {"json_schema": chain({"type": "array", "items": {"$ref": "DEEPER"}}, 1000)},
        {"json_schema": chain({"anyOf": [{"$ref": "DEEPER"}, {"type": "null"}]}, 1000)},
        {"grammar": "start: s0\n" + "".join(f"s{i}: s{i + 1}\n" for i in range(4500))
            + 's4500: "a"'},
        {"grammar": "start: S0\n" + "".join(f"S{i}: S{i + 1}\n" for i in range(4500))
            + 'S4500: "a"'},
    ],
)  # fmt: skip
def test_hazard_f4_references_do_not_end_the_process(named: dict[str, Any]) -> None:
    """The library goes one call deeper for each: an ordinary stack overflowed."""
    made = compiler()
    with suppress(RequestError):  # the one with anyOf, by its second token
        assert mask(made.start(asked(**named)))
    assert mask(made.start(asked(regex="a"))) == {*ids("a")}


LINES = MAX_GRAMMAR_CHARACTERS - 20


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a"' + ' "\\' * (LINES // 3),
        'root ::= "a"' + ' "\\' * (LINES // 3),
        'start: "a"' + " /\\" * (LINES // 3),
        'start: "a"' + " <a" * (LINES // 3),
        'start: "a"' + "\n#" * (LINES // 2),
        "\n" * LINES + 'root ::= "a"',
        " \n" * (LINES // 2) + 'start: "a"',
        'start: "a"' + " %json" * (LINES // 6),
    ],
)
def test_hazard_f3_a_grammar_is_read_in_one_pass(grammar: str) -> None:
    """It took up to a minute in which no other Python code ran: what is not closed was looked at
    once for each of its beginnings.
    """
    begin = time.process_time()
    with suppress(RequestError):
        assert mask(compiler().start(asked(grammar=grammar))) == {*ids("a")}
    assert time.process_time() - begin < 2


class Slow:
    """Compiles nothing before it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on, self.asked = threading.Event(), list[Grammar]()
        self._compiled = compiled_grammar._compiled
        monkeypatch.setattr(compiled_grammar, "_compiled", self)
        monkeypatch.setattr(compiled_grammar, "_DEADLINE_S", 0.05)
        monkeypatch.setattr(deep_thread, "BUSY_S", 0.05)

    def __call__(self, grammar: Grammar, vocabulary: Any) -> Any:
        self.asked.append(grammar)
        self.go_on.wait(20)
        return self._compiled(grammar, vocabulary)


def test_what_is_not_compiled_in_time_is_refused_until_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow, made, grammar = Slow(monkeypatch), compiler(), asked(regex="a")
    for _ in range(3):  # one thread works on it, and no second one
        with pytest.raises(
            CompilerBusy, match=r"^regex 'a' is refused: it takes more than .*later"
        ):
            made.start(grammar)
    slow.go_on.set()
    compiled = made._kept[grammar]._thread
    assert compiled is not None
    assert compiled.ended(20)
    assert mask(made.start(grammar)) == {*ids("a")}
    assert slow.asked == [grammar]


def test_where_others_are_compiled_one_more_is_asked_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was told to be too slow itself, and for good."""
    monkeypatch.setattr(deep_thread, "_at_once", threading.BoundedSemaphore(4))
    slow, made = Slow(monkeypatch), compiler()
    for i in range(4):
        with pytest.raises(CompilerBusy, match="it takes more than"):
            made.start(asked(regex=f"a{i}"))
    with pytest.raises(CompilerBusy, match=r"^regex 'b' cannot be compiled now: others are being"):
        made.start(asked(regex="b"))
    slow.go_on.set()
    monkeypatch.setattr(deep_thread, "BUSY_S", 20)
    monkeypatch.setattr(compiled_grammar, "_DEADLINE_S", 20)
    assert mask(made.start(asked(regex="b"))) == {*ids("b")}


def test_an_interrupt_while_a_compile_begins_costs_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(deep_thread, "_at_once", threading.BoundedSemaphore(1))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            deep_thread.DeepThread(lambda: 1)
    assert deep_thread.DeepThread(lambda: 1).ended(20)


def test_a_thread_gives_its_place_back_where_it_took_it(monkeypatch: pytest.MonkeyPatch) -> None:
    places, go_on = threading.BoundedSemaphore(1), threading.Event()
    monkeypatch.setattr(deep_thread, "_at_once", places)
    runs = deep_thread.DeepThread(lambda: go_on.wait(20))
    assert not places.acquire(blocking=False)
    monkeypatch.setattr(deep_thread, "_at_once", threading.BoundedSemaphore(1))
    go_on.set()
    assert runs.ended(20)
    assert places.acquire(blocking=False)
    assert runs.made


@pytest.mark.parametrize(("retry_s", "seconds", "times"), [(0, 3, 3), (30, 3, 1), (0, 0, 1)])
def test_an_automaton_that_others_delayed_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, retry_s: float, seconds: float, times: int
) -> None:
    """After a while, and unless the time that it took was its own."""
    tried: list[Pattern] = []

    def late(pattern: Pattern, limits: AutomatonLimits, deadline: float) -> ByteAutomaton:
        tried.append(pattern)
        raise TooSlow("too slow")

    monkeypatch.setattr(compiled_grammar, "byte_automaton", late)
    monkeypatch.setattr(compiled_grammar, "_RETRY_S", retry_s)
    form = compiler()._compiled(asked(regex="a+"))
    for _ in range(3):
        with pytest.raises(NotRegular, match="too slow"):
            form.automaton(AutomatonLimits(seconds=seconds))
    assert len(tried) == times


def test_hazard_17_what_fails_in_an_answer_allows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library then allows the end tokens, by which the cut answer would count as complete."""
    monkeypatch.setattr(compiled_grammar, "_MOST_STATES", 300)
    made = compiler()
    grammar = asked(regex=".*a.{40}x")
    constraint = made.start(grammar)
    with pytest.raises(RequestError, match=r"^regex '.*' failed in this answer: .*too many stat"):
        follow(constraint, "abaabbabaaababab" * 8)
    words = memoryview(bytearray(b"\xff" * (VOCAB // 8))).cast("i")
    with pytest.raises(RequestError, match="failed in this answer"):
        constraint.fill_bitmask(words)
    assert not any(words)
    assert {*ids("ab")} <= mask(made.start(grammar))  # the next request has a new automaton


def test_a_token_that_is_not_allowed_is_an_error() -> None:
    constraint = compiler().start(asked(choice=["yes"]))
    with pytest.raises(RequestError, match=r"failed in this answer: .*doesn't satisfy"):
        constraint.advance(ids("n")[0])


def test_requests_share_what_is_compiled_and_have_a_state_of_their_own() -> None:
    made = compiler()
    first, second = (made.start(asked(choice=["yes", "no"])) for _ in range(2))
    follow(first, "ye")
    assert mask(second) == {*ids("yn")}
    follow(second, "no")
    assert mask(first) == {*ids("s")}
    assert len(made._kept) == 1


def test_hazard_f6_only_what_was_used_last_is_kept() -> None:
    made = compiler()
    for i in range(MOST_KEPT + 5):
        made.start(asked(choice=[f"answer {i}"]))
        made.start(asked(choice=["often"]))
    assert len(made._kept) == MOST_KEPT
    assert asked(choice=["often"]) in made._kept
    assert asked(choice=["answer 0"]) not in made._kept


def test_hazard_f6_forms_that_differ_in_one_option_are_kept_apart() -> None:
    made, schema = compiler(), {"properties": {"a": {"const": 1}}, "type": "object"}
    for _ in range(2):
        for text, named in (('{"a":1}', {}), ('{ "a":1}', {"whitespace": True})):
            follow(made.start(asked(json_schema=schema, **named)), text)
        follow(made.start(asked(json_schema=schema, additional_properties=True)), '{"a":1,"b":2}')
        with pytest.raises(RequestError, match="Unimplemented keys"):
            made.start(asked(json_schema={"not": {}}))


def test_what_has_served_many_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_grammar, "_MOST_STARTS", 3)
    made, grammar = compiler(), asked(regex="a+")
    kept = []
    for _ in range(5):
        made.start(grammar)
        kept.append(made._kept[grammar])
    assert kept[0] is kept[2] is not kept[3] is kept[4]


def test_many_threads_compile_a_grammar_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    compile_once = compiled_grammar._compiled

    def counted(grammar: Grammar, vocabulary: Any) -> Any:
        compiled.append(grammar)
        return compile_once(grammar, vocabulary)

    monkeypatch.setattr(compiled_grammar, "_compiled", counted)
    made, texts = compiler(), [f"text {i}" for i in range(4)]
    failed: list[BaseException] = []

    def ask(number: int) -> None:
        try:
            for turn in range(20):
                text = texts[(number + turn) % len(texts)]
                follow(made.start(asked(choice=[text])), text)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(compiled) == len(texts)


@pytest.mark.parametrize("vocab_size", [100, VOCAB, 300])
def test_masks_have_the_models_width(vocab_size: int) -> None:
    constraint = compiler(vocab_size).start(asked(choice=["A"]))
    assert mask(constraint, -(-vocab_size // 32)) == {*ids("A")}


def test_an_engine_without_a_tokenizer_says_so() -> None:
    with pytest.raises(RequestError, match=r"^regex is given, and this engine has no tok"):
        GrammarCompiler(None, VOCAB, [EOS]).start(asked(regex="a"))


def test_the_schemas_text_is_shown_shortened() -> None:
    schema = {"not": {}, "title": "long " * 1000}
    with pytest.raises(RequestError) as raised:
        compiler().start(asked(json_schema=json.dumps(schema)))
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("vocab_size", [110, VOCAB])
def test_the_device_takes_a_form_whose_tokenizer_has_more_tokens_than_the_model(
    vocab_size: int,
) -> None:
    """The ids beyond the model's are not allowed in any state."""
    made = GrammarCompiler(TOKENIZER, vocab_size, [EOS], automaton_words=2**18)
    automaton = made.automaton(asked(regex="[a-zà]{1,3}x"))
    first = {*ids("abcdefghijklmnopqrstuvwxyz"), ids("à")[0]}
    words = automaton.masks[automaton.mask_of[0]].tolist()
    allowed = {32 * i + bit for i, word in enumerate(words) for bit in range(32) if word >> bit & 1}
    assert allowed == {token for token in first if token < vocab_size}
