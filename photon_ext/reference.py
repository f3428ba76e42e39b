"""Every op of :mod:`photon_ext.ops` in plain PyTorch: the same signatures, the same updates in
place, no care for speed.

This is the specification that tests compare the kernels with. Floating maths is done in float32 and
rounded where the kernels round; given float64 tensors it is done in float64 and rounds nowhere,
which makes the yardstick for the kernels' errors.

Shapes and dtypes are those of the op of the same name, which documents them; floating tensors may
be float64 too, strides are free, and the device is any. Nothing is checked: what does not fit
raises what PyTorch raises (RuntimeError, IndexError), or is broadcast. Most of these functions read
tensors on the host, and so wait for their device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from photon_ext.dequantize import dequantized
from photon_ext.fp8_tokens import Fp8Tokens
from photon_ext.layout import (
    AUTOMATON_HEADER,
    DELTA_HEADER,
    DELTA_RUN_WORDS,
    DELTA_ZEROS,
    FIRST_EMBED,
    HOST_MASK,
    LINK_COLUMNS,
    LINK_SPARE,
    MOST_LOGPROBS,
    NO_PAGE,
    NO_TOKEN,
    RECORD_TOKENS,
    AutomatonWord,
    Count,
    DeltaTable,
    Meta,
    RecordFlag,
    RowColumn,
    SegmentFlag,
    VocabularyWord,
)
from photon_ext.weight import Weight
from photon_ext.weight_format import FP8_MOST

_INT32_MAX = 2**31 - 1
_U32 = 0xFFFFFFFF


# --- step: the head and the tail ------------------------------------------------------------------


def _is_alive(row_state: Tensor, row: int) -> bool:
    return 0 < row < row_state.shape[0] and int(row_state[row, RowColumn.ALIVE]) != 0


def _apply_deltas(tables: Sequence[Tensor], deltas: Tensor) -> None:
    words = deltas.tolist()
    for i in range(words[0]):
        run = words[DELTA_HEADER + DELTA_RUN_WORDS * i :][:DELTA_RUN_WORDS]
        if len(run) < DELTA_RUN_WORDS:
            break
        table, offset, count, payload = run
        if not 0 <= table < len(tables) or min(offset, count, payload - DELTA_ZEROS) < 0:
            continue
        if offset + count > tables[table].numel():
            continue
        if payload == DELTA_ZEROS:
            tables[table].view(-1)[offset : offset + count] = 0
        elif payload + count <= len(words):
            tables[table].view(-1)[offset : offset + count] = deltas[payload : payload + count]
    deltas[0] = 0


def begin_step_(
    tables: Sequence[Tensor],
    deltas: Tensor,
    segments: Tensor,
    staged_ids: Tensor,
    decode_meta: Tensor,
    counts: Tensor,
) -> None:
    """As :func:`photon_ext.ops.begin_step_`: the int32 tables, decode_meta [T, 4] and counts [3]
    are updated in place.

    Segments must not overlap; what overlapping ones give is undefined, here as there.
    """
    row_state = tables[DeltaTable.ROW_STATE]
    _apply_deltas(tables, deltas)
    decode_meta.zero_()
    counts.zero_()
    for index, (row, first, num_tokens, flags) in enumerate(segments.tolist()):
        if not _is_alive(row_state, row):
            continue
        position = int(row_state[row, RowColumn.POSITION])
        tokens = _take_tokens(row_state[row], staged_ids, first, num_tokens, flags)
        if NO_TOKEN in tokens:
            row_state[row, RowColumn.ALIVE] = 0
            continue
        if flags & SegmentFlag.STAGED:
            begin = int(row_state[row, RowColumn.ANSWER_BEGIN])
            _count_tokens(tables, row, tokens[max(0, begin - position) :])
        for i, token in enumerate(tokens):
            decode_meta[first + i] = torch.tensor([token, position + i, position + i + 1, row])
        end = first + num_tokens
        if not flags & SegmentFlag.STAGED:
            counts[Count.DECODE_TOKENS] = max(int(counts[Count.DECODE_TOKENS]), end)
        counts[Count.TOKENS] = max(int(counts[Count.TOKENS]), end)
        if flags & SegmentFlag.SAMPLE:
            counts[Count.SEGMENTS] = index + 1


def _take_tokens(
    state: Tensor, staged_ids: Tensor, first: int, num_tokens: int, flags: int
) -> list[int]:
    """The tokens of a live row's segment, those that were staged consumed; NO_TOKEN alone where
    the segment does not fit step or row.
    """
    position = int(state[RowColumn.POSITION])
    if (
        num_tokens < 1
        or first < 0
        or first + num_tokens > len(staged_ids)
        or not 0 <= position <= _INT32_MAX - num_tokens
    ):
        return [NO_TOKEN]
    if not flags & SegmentFlag.STAGED:
        return [int(state[RowColumn.LAST_TOKEN]) if num_tokens == 1 else NO_TOKEN]
    tokens: list[int] = staged_ids[first : first + num_tokens].tolist()
    staged_ids[first : first + num_tokens] = NO_TOKEN
    return tokens


def carry_over_ids_(next_ids: Tensor, prev: Tensor, idx: Tensor) -> None:
    """As :func:`photon_ext.ops.carry_over_ids_`: next_ids int32 [n] is updated from prev int32
    [m] by idx int32 [n].
    """
    known = (idx >= 0) & (idx < len(prev))
    next_ids[known] = prev[idx[known].long()]


def decode_meta_set_(
    decode_meta: Tensor, tokens: Tensor, positions: Tensor, rows: Tensor | None = None
) -> None:
    """As :func:`photon_ext.ops.decode_meta_set_`: int32 [n, 4] is written from tokens, positions
    and rows, int32 [n] each.
    """
    owner = (
        torch.arange(len(tokens), device=tokens.device, dtype=torch.int32) if rows is None else rows
    )
    live = (positions >= 0) & (positions < _INT32_MAX)
    decode_meta.copy_(torch.stack([tokens, positions, positions + 1, owner], 1) * live[:, None])


def publish_(
    tables: Sequence[Tensor],
    out_record: Tensor,
    sampled: Tensor,
    segments: Tensor,
    row_errors: Tensor | None = None,
    automata: Tensor | None = None,
) -> None:
    """As :func:`photon_ext.ops.publish_`: row_state [rows, 32], the first of the tables, is
    updated, out_record [R, W] written, both int32.

    W below 5 is a RuntimeError.
    """
    row_state, stop_ids = tables[DeltaTable.ROW_STATE], tables[DeltaTable.STOP_IDS]
    for index, (row, _, num_tokens, flags) in enumerate(segments.tolist()):
        known = 0 <= row < len(row_state)
        record = [row, int(row_state[row, RowColumn.GENERATION]) if known else 0, 0, 0]
        token = -1
        if not _is_alive(row_state, row):
            record[3] = RecordFlag.DEAD
        else:
            state = row_state[row]
            state[RowColumn.POSITION] += num_tokens
            if flags & SegmentFlag.SAMPLE:
                error = int(row_errors[index]) if row_errors is not None else 0
                token = int(sampled[index])
                error = error or _automaton_error(state, stop_ids[row], token, automata)
                record[2:], token = _take_token(state, stop_ids[row], token, error, automata)
                _count_tokens(tables, row, [token])
        out_record[index] = -1
        out_record[index, : RECORD_TOKENS + 1] = torch.tensor([*record, token])


def _take_token(
    state: Tensor, stops: Tensor, token: int, error: int, automata: Tensor | None
) -> tuple[list[int], int]:
    """Advances a row that was to be sampled; returns its record's (n_tokens, flags) and token."""
    if error or token < 0:
        state[RowColumn.ALIVE] = 0
        return [0, error or RecordFlag.NO_CANDIDATE], -1
    state[RowColumn.LAST_TOKEN] = token
    state[RowColumn.REMAINING] -= 1
    flags = 0
    if _is_stop(state, stops, token):
        flags = int(RecordFlag.STOP)
    elif _completes(state, token, automata):
        flags = int(RecordFlag.COMPLETE)
    elif state[RowColumn.REMAINING] <= 0:
        flags = int(RecordFlag.LENGTH)
    if flags:
        state[RowColumn.ALIVE] = 0
    return [1, flags], token


class _Automaton(NamedTuple):
    """A row's automaton at its state: views of the words of all automata, on the host."""

    state: int
    classes: Tensor  # [256]
    states: Tensor  # [states]
    transitions: Tensor  # [states, classes]
    masks: Tensor  # [masks, words]

    @property
    def accepting(self) -> bool:
        return bool(int(self.states[self.state]) & 1)

    @property
    def complete(self) -> bool:
        return bool(int(self.states[self.state]) & 2)

    def allowed(self, vocab: int) -> Tensor:
        """Whether the state allows each id, bool [vocab]."""
        mask = self.masks[int(self.states[self.state]) >> 2]
        return (mask[:, None] >> torch.arange(32, dtype=torch.int32) & 1).flatten()[:vocab].bool()

    def behind(self, text: list[int]) -> _Automaton:
        """The same behind these bytes. Raises ValueError where they lead nowhere."""
        state = self.state
        for byte in text:
            byte_class, classes = int(self.classes[byte]), self.transitions.shape[1]
            state = int(self.transitions[state, byte_class]) if byte_class < classes else -1
            if not 0 <= state < len(self.states):
                raise ValueError(f"byte {byte} leads nowhere")
        return self._replace(state=state)


def _automaton_of(state: Tensor, automata: Tensor | None) -> _Automaton | None:
    """The automaton of a row's words; None: it has none. Raises ValueError where what the row names
    is none.
    """
    begin = int(state[RowColumn.AUTOMATON])
    if begin == 0:
        return None
    if automata is None or not 0 < begin <= len(automata) - AUTOMATON_HEADER:
        raise ValueError(f"no automaton begins at word {begin}")
    words = automata[begin:].cpu()
    head = words[:AUTOMATON_HEADER].tolist()
    count, classes = head[AutomatonWord.STATES], head[AutomatonWord.CLASSES]
    masks, width = head[AutomatonWord.MASKS], head[AutomatonWord.MASK_WORDS]
    at = AUTOMATON_HEADER + 64
    found = _Automaton(
        int(state[RowColumn.AUTOMATON_STATE]),
        words[AUTOMATON_HEADER:at].contiguous().view(torch.uint8).int(),
        words[at : at + count],
        words[at + count : at + count * (1 + classes)].view(count, classes),
        words[head[AutomatonWord.MASKS_BEGIN] :][: masks * width].view(masks, width),
    )
    if not 0 <= found.state < count:
        raise ValueError(f"state {found.state} of {count}")
    return found


def _behind_token(automaton: _Automaton, token: int, automata: Tensor) -> _Automaton:
    """The automaton behind a token; where it ends the answer, as it is. Raises ValueError where it
    is not allowed.
    """
    header = len(VocabularyWord)
    word = int(automata[header + token]) if token < int(automata[VocabularyWord.TOKENS]) else 0
    if word == -1 and automaton.accepting:
        return automaton
    if word <= 0:
        raise ValueError(f"token {token} has no bytes")
    begin = 4 * int(automata[VocabularyWord.BYTES]) + (word >> 8)
    text = automata.cpu().view(torch.uint8)[begin : begin + (word & 255)]
    return automaton.behind(text.tolist())


def _automaton_error(state: Tensor, stops: Tensor, token: int, automata: Tensor | None) -> int:
    """The flag of a row whose automaton is none, or forbids the token; 0: neither."""
    if token >= 0 and _is_stop(state, stops, token):
        return 0
    try:
        automaton = _automaton_of(state, automata)
        if automaton is not None and token >= 0:
            assert automata is not None
            _behind_token(automaton, token, automata)
    except ValueError:
        return int(RecordFlag.AUTOMATON_ERROR)
    return 0


def _completes(state: Tensor, token: int, automata: Tensor | None) -> bool:
    """Takes an allowed token into the row's automaton; whether nothing may follow."""
    automaton = _automaton_of(state, automata)
    if automaton is None or automata is None:
        return False
    after = _behind_token(automaton, token, automata)
    state[RowColumn.AUTOMATON_STATE] = after.state
    ends = int(automata[len(VocabularyWord) + token]) == -1
    return ends or after.complete


def _is_stop(state: Tensor, stops: Tensor, token: int) -> bool:
    return token in stops[: max(0, int(state[RowColumn.STOP_COUNT]))].tolist()


def _table(tables: Sequence[Tensor] | None, place: DeltaTable) -> Tensor | None:
    """An extension table; None where the list ends before it, or it has no words."""
    if tables is None or place >= len(tables) or not tables[place].shape[1]:
        return None
    return tables[place]


def _penalties(state: Tensor) -> tuple[float, float, float] | None:
    """Those of repetition, presence and frequency; None where none of them is on."""
    columns = RowColumn.REPETITION_PENALTY, RowColumn.PRESENCE_PENALTY, RowColumn.FREQUENCY_PENALTY
    repetition, presence, frequency = (state[c].view(torch.float32).item() for c in columns)
    repetition = repetition if repetition > 0 else 1.0
    found = repetition, presence, frequency
    return None if found == (1.0, 0.0, 0.0) else found


def _count_tokens(tables: Sequence[Tensor], row: int, tokens: Sequence[int]) -> None:
    """Tokens of the answer of a row with penalties."""
    counts, bits = (
        _table(tables, place) for place in (DeltaTable.TOKEN_COUNTS, DeltaTable.SEEN_BITS)
    )
    if counts is None or _penalties(tables[DeltaTable.ROW_STATE][row]) is None:
        return
    for token in tokens:
        if 0 <= token < counts.shape[1]:
            counts[row, token] += 1
            if bits is not None and token >> 5 < bits.shape[1]:
                bit = 1 << (token & 31)
                bits[row, token >> 5] |= bit - (1 << 32) if bit >> 31 else bit


# --- sampling -------------------------------------------------------------------------------------


def apply_token_mask_(
    logits: Tensor,
    mask: Tensor,
    mask_keys: Tensor,
    segments: Tensor,
    row_state: Tensor,
    row_errors: Tensor,
) -> None:
    """As :func:`photon_ext.ops.apply_token_mask_`: logits [R, vocab] are updated, row_errors int32
    [R] written.

    A mask with too few words for the vocabulary is an IndexError, where a row has one.
    """
    ids = torch.arange(logits.shape[1], device=logits.device)
    keys = mask_keys.tolist()
    row_errors.zero_()
    for index, (row, _, num_tokens, flags) in enumerate(segments.tolist()):
        if not flags & SegmentFlag.SAMPLE or not _is_alive(row_state, row):
            continue
        if keys[index][0] == 0:
            missing = int(row_state[row, RowColumn.CONSTRAINT]) == HOST_MASK
            row_errors[index] = int(RecordFlag.MASK_ERROR) if missing else 0
        elif keys[index][:2] == [
            row,
            int(row_state[row, RowColumn.POSITION]) + num_tokens - 1,
        ] and keys[index][2] in range(len(mask)):
            allowed = (mask[keys[index][2], ids >> 5] >> (ids & 31)) & 1
            logits[index, allowed == 0] = -torch.inf
        else:
            row_errors[index] = int(RecordFlag.MASK_ERROR)


def philox4x32(counter: Tensor, key0: int, key1: int) -> Tensor:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    Args:
        counter: int64 [n, 4] of unsigned 32-bit words.
        key0: unsigned 32-bit.
        key1: unsigned 32-bit.

    Returns:
        int64 [n, 4] of unsigned 32-bit words.
    """
    c0, c1, c2, c3 = counter.unbind(1)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # low 64 bits; the sign bit is one of them
        c0, c1, c2, c3 = (
            (p1 >> 32 & _U32) ^ c1 ^ key0,
            p1 & _U32,
            (p0 >> 32 & _U32) ^ c3 ^ key1,
            p0 & _U32,
        )
        key0, key1 = (key0 + 0x9E3779B9) & _U32, (key1 + 0xBB67AE85) & _U32
    return torch.stack([c0, c1, c2, c3], 1)


def token_uniforms(
    seed_low: int, seed_high: int, position: int, vocab: int, device: torch.device
) -> Tensor:
    """The uniform number in (0, 1) of every token id at one position: float32 [vocab].

    Seeds and position count modulo 2**32.
    """
    blocks = torch.arange((vocab + 3) // 4, device=device)
    counter = torch.zeros(len(blocks), 4, dtype=torch.int64, device=device)
    counter[:, 0] = blocks
    counter[:, 1] = position & _U32
    bits = philox4x32(counter, seed_low & _U32, seed_high & _U32).reshape(-1)[:vocab]
    return ((bits >> 9).float() + 0.5) / 2**23


_DISTANCE_UNITS = float.fromhex("0x1.715476p+27")  # log2(e) * 2^27, as a float32
_POWER = (19791209, 118771734, 515791228, 1488515800, 2**31)  # of 2^-f, see csrc/common/filter.h


def token_weights(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """How far each id is below the likeliest, and what it weighs.

    Args:
        scaled: float32 [n], logits divided by the temperature; none is NaN.

    Returns:
        int64 [n], distances in units of 2^-27 of a halving of the probability, and int64 [n],
        2^31 * 2^-distance, by a polynomial in integers. From 32 halvings on the weight is 0, and
        the id is never drawn: no noise lifts it so far.
    """
    top = scaled.max()
    units = torch.where(scaled == top, 0.0, (top - scaled) * _DISTANCE_UNITS)
    distance = units.double().clamp(max=2.0**32).long()
    fraction = (distance & 2**27 - 1) << 4
    power = torch.full_like(distance, 2036727)
    for coefficient in _POWER:
        power = coefficient - (fraction * power >> 31)
    return distance, power >> (distance >> 27)


def kept_ids(scaled: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Which ids may be drawn: of the `top_k` likeliest (0: all), ties included, the fewest of the
    likeliest that have a share of `top_p` in their mass (1: all), ties included; of these, those
    that weigh at least `min_p` of the likeliest.

    Args:
        scaled: float32 [n], n >= 1, logits divided by the temperature; none is NaN.

    Returns:
        bool [n]. Ids that can never be drawn (see :func:`token_weights`) are not kept.
    """
    distance, weight = token_weights(scaled)
    kept = distance < 2**32
    if 0 < top_k < len(distance):
        kept &= distance <= distance.sort().values[top_k - 1]
    if 0 < top_p < 1:
        order = distance.masked_fill(~kept, 2**32).argsort()[: int(kept.sum())]
        mass = weight[order].cumsum(0)
        needed = max(int(mass[-1]) * max(int(top_p * 2**32), 1) >> 32, 1)
        kept &= distance <= distance[order[int((mass < needed).sum())]]
    if 0 < min_p <= 1:
        kept &= weight >= int(min_p * 2**31)
    return kept


def sample_into(
    out: Tensor,
    logits: Tensor,
    segments: Tensor,
    row_state: Tensor,
    row_errors: Tensor | None = None,
    hopper: bool = False,
    tables: Sequence[Tensor] | None = None,
    logprobs: Tensor | None = None,
    automata: Tensor | None = None,
) -> None:
    """As :func:`photon_ext.ops.sample_into`: out int32 [R] is written from logits [R, vocab], in
    float32 whatever their dtype; logits of stop ids that are not to be sampled yet become -inf.

    `hopper` changes nothing.
    """
    out.fill_(-1)
    for index, (row, _, num_tokens, flags) in enumerate(segments.tolist()):
        failed = row_errors is not None and int(row_errors[index]) != 0
        if failed or not flags & SegmentFlag.SAMPLE or not _is_alive(row_state, row):
            continue
        state = row_state[row]
        try:
            automaton = _automaton_of(state, automata)
        except ValueError:
            continue
        if automaton is not None:
            logits[index, ~automaton.allowed(logits.shape[1]).to(logits.device)] = -torch.inf
        given = logits[index].float().clone()
        stop_ids = _table(tables, DeltaTable.STOP_IDS)
        if stop_ids is not None:
            logits[index, _suppressed_stops(state, stop_ids[row], logits.shape[1])] = -torch.inf
        scores = adjusted(logits[index].float(), row, tables)
        candidate = scores > -torch.inf
        temperature = float(state[RowColumn.TEMPERATURE].view(torch.float32))
        if int(state[RowColumn.LOGPROBS]) < 0:  # processed
            given = scores / temperature if temperature > 0 else scores
        if temperature > 0:
            seeds = int(state[RowColumn.SEED_LOW]), int(state[RowColumn.SEED_HIGH])
            position = int(state[RowColumn.POSITION]) + num_tokens - 1
            uniform = token_uniforms(*seeds, position, len(scores), logits.device)
            scores = scores / temperature
            if candidate.any():
                candidate[candidate.clone()] = kept_ids(scores[candidate], *_filter(state))
            scores -= torch.log(-torch.log(uniform))
        if candidate.any():
            best = scores[candidate].max()
            out[index] = torch.nonzero(candidate & (scores == best))[0, 0]
            if logprobs is not None:
                _put_logprobs(
                    logprobs[index], given, int(out[index]), int(state[RowColumn.LOGPROBS])
                )
        elif row_errors is not None:
            row_errors[index] = int(RecordFlag.NO_CANDIDATE)


def _put_logprobs(out: Tensor, logits: Tensor, sampled: int, asked: int) -> None:
    """A row's log-probabilities, where it asks for them: 1 + that many of the likeliest, or the
    negative of it.
    """
    if asked == 0:
        return
    found = logits.masked_fill(logits.isnan(), -torch.inf).double().log_softmax(0).float()
    out[0] = found[sampled].view(torch.int32)
    top = min(abs(asked) - 1, (len(out) - 1) // 2, MOST_LOGPROBS)
    order = found.sort(descending=True, stable=True).indices[:top]
    order = order[found[order] > -torch.inf]
    pairs = out[1 : 1 + 2 * top].view(-1, 2)
    pairs[:, 0], pairs[:, 1] = -1, torch.tensor(-torch.inf).view(torch.int32)
    pairs[: len(order), 0] = order.int()
    pairs[: len(order), 1] = found[order].view(torch.int32)


def adjusted(logits: Tensor, row: int, tables: Sequence[Tensor] | None) -> Tensor:
    """What is sampled of a row's logits: first its biases are added; then ids that are in its
    prompt or answer are divided by the repetition penalty where they are above 0, and multiplied
    by it where not; then those in its answer lose the frequency penalty for each time that they
    came, and the presence penalty once.

    Args:
        logits: float32 [vocab].
        tables: those of the rows, see layout.DeltaTable; None: nothing is changed.
    """
    if tables is None:
        return logits
    state, found = tables[DeltaTable.ROW_STATE][row], logits.clone()
    biases = _table(tables, DeltaTable.BIASES)
    if biases is not None:
        for id_, bias in biases[row][: biases.shape[1] // 2 * 2].view(-1, 2)[
            : max(0, int(state[RowColumn.BIAS_COUNT]))
        ]:
            if 0 <= id_ < len(found):
                found[id_] += bias.view(torch.float32)
    penalties, counts = _penalties(state), _table(tables, DeltaTable.TOKEN_COUNTS)
    if penalties is None or counts is None:
        return found
    repetition, presence, frequency = penalties
    count = torch.zeros(len(found), dtype=torch.int32, device=found.device)
    counted = min(len(found), counts.shape[1])
    count[:counted] = counts[row, :counted].clamp(min=0)
    seen = _seen(row, len(found), tables) | (count > 0)
    divided = torch.where(found > 0, found / repetition, found * repetition)
    found = torch.where(seen, divided, found)
    # one rounding each, as of a fused multiply-add
    lowered = (found.double() - frequency * count.double()).float() - presence
    return torch.where(count > 0, lowered, found)


def _seen(row: int, vocab: int, tables: Sequence[Tensor]) -> Tensor:
    ids = torch.arange(vocab, device=tables[0].device)
    bits = _table(tables, DeltaTable.SEEN_BITS)
    if bits is None:
        return ids < 0
    words = bits[row, (ids >> 5).clamp(max=bits.shape[1] - 1)]
    return ((words >> (ids & 31)) & 1 != 0) & (ids < 32 * bits.shape[1])


def _suppressed_stops(state: Tensor, stops: Tensor, vocab: int) -> Tensor:
    after = int(state[RowColumn.STOP_AFTER])
    suppressed = 0 < after <= int(state[RowColumn.REMAINING])
    ids = stops[: max(0, int(state[RowColumn.STOP_COUNT])) if suppressed else 0].long()
    return ids[(ids >= 0) & (ids < vocab)]


def _filter(state: Tensor) -> tuple[int, float, float]:
    top_p, min_p = (state[c].view(torch.float32).item() for c in (RowColumn.TOP_P, RowColumn.MIN_P))
    return int(state[RowColumn.TOP_K]), top_p, min_p


def sample(
    logits: Tensor,
    segments: Tensor,
    row_state: Tensor,
    row_errors: Tensor | None = None,
    hopper: bool = False,
    tables: Sequence[Tensor] | None = None,
    logprobs: Tensor | None = None,
) -> Tensor:
    """As :func:`photon_ext.ops.sample`: a new int32 [R]."""
    out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    sample_into(out, logits, segments, row_state, row_errors, hopper, tables, logprobs)
    return out


# --- embedding ------------------------------------------------------------------------------------


def embedding(decode_meta: Tensor, weight: Tensor, embeds: Tensor | None = None) -> Tensor:
    """As :func:`photon_ext.ops.embedding`: a new [T, hidden] of the dtype of weight."""
    token = decode_meta[:, Meta.TOKEN].long()
    row = torch.where(token <= FIRST_EMBED, len(weight) + FIRST_EMBED - token, token)
    known = (decode_meta[:, Meta.LENGTH] > 0) & (row >= 0)
    known &= (token <= FIRST_EMBED) | (token < len(weight))
    rows = weight if embeds is None else torch.cat([weight, embeds.to(weight.dtype)])
    known &= row < len(rows)
    return rows[row * known].masked_fill(~known[:, None], 0)


def embedding_into(
    out: Tensor, decode_meta: Tensor, weight: Tensor | Weight, embeds: Tensor | None = None
) -> None:
    """As :func:`photon_ext.ops.embedding_into`: out [T, hidden] is written."""
    out.copy_(embedding(decode_meta, dequantized(weight), embeds))


def select_tokens_into(out: Tensor, x: Tensor, segments: Tensor) -> None:
    """As :func:`photon_ext.ops.select_tokens_into`: out [R, hidden] is written from x [T,
    hidden].
    """
    for index, (_, first, num_tokens, _) in enumerate(segments.tolist()):
        last = first + num_tokens - 1
        out[index] = x[last] if num_tokens > 0 and 0 <= last < len(x) else 0


# --- norm -----------------------------------------------------------------------------------------


def _wide(x: Tensor) -> Tensor:
    """x in the dtype of the maths: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As :func:`photon_ext.ops.rms_norm`: a new tensor of the shape and dtype of x, which may be
    any [..., hidden].
    """
    wide = _wide(x)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (_wide(weight) * _wide(normed.to(x.dtype))).to(x.dtype)


def rms_norm_into(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """As :func:`photon_ext.ops.rms_norm_into`: out is written; x as in :func:`rms_norm`."""
    out.copy_(rms_norm(x, weight, eps))


def add_rms_norm_into(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """As :func:`photon_ext.ops.add_rms_norm_into`: residual is updated, then out written; both
    have the shape of x.
    """
    residual.copy_(_wide(residual) + _wide(x))
    out.copy_(rms_norm(residual, weight, eps))


# --- linear and mlp -------------------------------------------------------------------------------


def linear(
    x: Tensor,
    weight: Tensor | Weight,
    bias: Tensor | None = None,
) -> Tensor:
    """As :func:`photon_ext.ops.linear`: a new [T, n] of the dtype of x; PyTorch chooses the
    order of its sums.
    """
    total = _wide(x) @ dequantized(weight).to(_wide(x).dtype).T
    return (total if bias is None else total + _wide(bias)).to(x.dtype)


def linear_into(
    out: Tensor,
    x: Tensor | Fp8Tokens,
    weight: Tensor | Weight,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
    hopper: bool = False,
    pdl: bool = False,
) -> None:
    """As :func:`photon_ext.ops.linear_into`: the tokens of out [T, n] within the counts are
    written.
    """
    num_tokens = _leading_tokens(out, counts)
    out[:num_tokens] = _linear(x, num_tokens, weight, bias, out.dtype)


def gemv_into(
    out: Tensor,
    x: Tensor,
    weight: Tensor | Weight,
    bias: Tensor | None = None,
) -> None:
    """As :func:`photon_ext.ops.gemv_into`: out [n] is written from x [k]."""
    out.copy_(linear(x[None], weight, bias)[0])


def dequantize_into(out: Tensor, weight: Weight) -> None:
    """As :func:`photon_ext.ops.dequantize_into`: out [n, k] is written."""
    out.copy_(dequantized(weight))


def quantize_fp8_into(out: Fp8Tokens, x: Tensor, counts: Tensor | None = None) -> None:
    """As :func:`photon_ext.ops.quantize_fp8_into`: the tokens of out within the counts are
    written.
    """
    num_tokens = _leading_tokens(x, counts)
    wide = x[:num_tokens].float()
    largest = wide.abs().amax(-1)
    scale = largest / torch.full_like(largest, FP8_MOST)  # of a number CUDA takes the inverse
    out.scale[:num_tokens] = scale
    shares = torch.where(scale == 0, 0, wide.T / scale).T.clamp(-FP8_MOST, FP8_MOST)
    out.data[:num_tokens] = shares.to(torch.float8_e4m3fn)


def _linear(
    x: Tensor | Fp8Tokens,
    num_tokens: int,
    weight: Tensor | Weight,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Of so many tokens, in `dtype`, which is that of x where it is not in fp8."""
    if not isinstance(x, Fp8Tokens):
        return linear(x[:num_tokens], weight, bias)
    numbers = x.data[:num_tokens].float() * x.scale[:num_tokens, None]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return linear(numbers.to(wide), weight, bias).to(dtype)


def _add_product(
    residual: Tensor,
    x: Tensor | Fp8Tokens,
    num_tokens: int,
    weight: Tensor | Weight,
    bias: Tensor | None,
) -> None:
    product = _linear(x, num_tokens, weight, bias, residual.dtype)
    residual[:num_tokens] = _wide(residual[:num_tokens]) + _wide(product)


def _leading_tokens(x: Tensor, counts: Tensor | None) -> int:
    return len(x) if counts is None else min(max(int(counts[0]), 0), len(x))


def silu_mul(gate_up: Tensor) -> Tensor:
    """As :func:`photon_ext.ops.silu_mul`: a new [..., width]; gate_up may be any [..., 2 *
    width].
    """
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    activated = (gate / (1 + torch.exp(-gate))).to(gate_up.dtype)
    return (_wide(activated) * up).to(gate_up.dtype)


def silu_mul_into(out: Tensor, gate_up: Tensor) -> None:
    """As :func:`photon_ext.ops.silu_mul_into`: out is written; gate_up as in :func:`silu_mul`."""
    out.copy_(silu_mul(gate_up))


def fused_mlp(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """As :func:`photon_ext.ops.fused_mlp`: a new [T, hidden] of the dtype of x."""
    return linear(silu_mul(linear(x, gate_up_weight)), down_weight)


def fused_mlp_into(
    out: Tensor,
    act: Tensor,
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    counts: Tensor | None = None,
) -> None:
    """As :func:`photon_ext.ops.fused_mlp_into`: the tokens of act [T, intermediate] and out [T,
    hidden] within the counts are written.
    """
    num_tokens = _leading_tokens(x, counts)
    act[:num_tokens] = silu_mul(linear(x[:num_tokens], gate_up_weight))
    out[:num_tokens] = linear(act[:num_tokens], down_weight)


# --- fused linears: `hopper` is a choice among kernels, and nothing here --------------------------


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor | Weight,
    bias: Tensor | None = None,
    *,
    hopper: bool = False,
) -> Tensor:
    """As :func:`photon_ext.ops.norm_linear`: a new [T, n] of the dtype of x."""
    return linear(rms_norm(x, norm_weight, eps), weight, bias)


def norm_linear_into(
    out: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor | Weight,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
    hopper: bool = False,
    pdl: bool = False,
    workspace: Tensor | None = None,
) -> None:
    """As :func:`photon_ext.ops.norm_linear_into`: the tokens of out [T, n] within the counts are
    written.
    """
    linear_into(
        out,
        rms_norm(x, norm_weight, eps),
        weight,
        bias,
        counts,
    )


def linear_residual_(
    residual: Tensor,
    x: Tensor,
    weight: Tensor | Weight,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
    hopper: bool = False,
    pdl: bool = False,
    workspace: Tensor | None = None,
) -> None:
    """As :func:`photon_ext.ops.linear_residual_`: the tokens of residual [T, n] within the
    counts are updated.
    """
    _add_product(residual, x, _leading_tokens(x, counts), weight, bias)


def norm_swiglu(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    gate_up_weight: Tensor | Weight,
    bias: Tensor | None = None,
    *,
    hopper: bool = False,
) -> Tensor:
    """As :func:`photon_ext.ops.norm_swiglu`: a new [T, intermediate] of the dtype of x."""
    return silu_mul(norm_linear(x, norm_weight, eps, gate_up_weight, bias))


def norm_swiglu_into(
    out: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    gate_up_weight: Tensor | Weight,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
    hopper: bool = False,
    pdl: bool = False,
    workspace: Tensor | None = None,
) -> None:
    """As :func:`photon_ext.ops.norm_swiglu_into`: the tokens of out [T, intermediate] within the
    counts are written.
    """
    num_tokens = _leading_tokens(x, counts)
    out[:num_tokens] = norm_swiglu(x[:num_tokens], norm_weight, eps, gate_up_weight, bias)


def swiglu_into(
    out: Tensor,
    x: Tensor | Fp8Tokens,
    gate_up_weight: Tensor | Weight,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
    hopper: bool = False,
    pdl: bool = False,
) -> None:
    """As :func:`photon_ext.ops.swiglu_into`: the tokens of out [T, intermediate] within the counts
    are written.
    """
    num_tokens = _leading_tokens(out, counts)
    out[:num_tokens] = silu_mul(_linear(x, num_tokens, gate_up_weight, bias, out.dtype))


def linear_norm_into(
    out: Tensor | Fp8Tokens,
    residual: Tensor,
    x: Tensor | Fp8Tokens,
    weight: Tensor | Weight,
    norm_weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
    hopper: bool = False,
    pdl: bool = False,
    workspace: Tensor | None = None,
) -> None:
    """As :func:`photon_ext.ops.linear_norm_into`: the tokens of residual [T, n] within the counts
    are updated, those of out [T, n] written.
    """
    num_tokens = _leading_tokens(residual, counts)
    _add_product(residual, x, num_tokens, weight, bias)
    normed = rms_norm(residual[:num_tokens], norm_weight, eps)
    if isinstance(out, Fp8Tokens):
        quantize_fp8_into(Fp8Tokens(*(part[:num_tokens] for part in out)), normed)
    else:
        out[:num_tokens] = normed


# --- lora -----------------------------------------------------------------------------------------


def _slots(decode_meta: Tensor, row_state: Tensor, count: int) -> list[int]:
    """The slot of each token; 0: none."""
    slots = []
    for _, _, length, row in decode_meta.tolist():
        live = length > 0 and 0 <= row < len(row_state)
        slot = int(row_state[row, RowColumn.LORA_SLOT]) if live else 0
        slots.append(slot if 0 < slot <= count else 0)
    return slots


def lora_shrink_into(
    out: Tensor, x: Tensor, a: Tensor, decode_meta: Tensor, row_state: Tensor
) -> None:
    """As :func:`photon_ext.ops.lora_shrink_into`: tokens of out [T, rows] with a slot are
    written.
    """
    for token, slot in enumerate(_slots(decode_meta, row_state, len(a))):
        if slot:
            out[token] = linear(x[token : token + 1], a[slot - 1])[0]


def lora_shrink(x: Tensor, a: Tensor, decode_meta: Tensor, row_state: Tensor) -> Tensor:
    """As :func:`photon_ext.ops.lora_shrink`: a new [T, rows] of the dtype of x."""
    out = x.new_zeros(x.shape[0], a.shape[1])
    lora_shrink_into(out, x, a, decode_meta, row_state)
    return out


def lora_expand_(
    out: Tensor,
    h: Tensor,
    b: Tensor,
    decode_meta: Tensor,
    row_state: Tensor,
    first_rows: int,
) -> None:
    """As :func:`photon_ext.ops.lora_expand_`: tokens of out [T, n] with a slot are updated."""
    n, rank = b.shape[1:]
    others = h.shape[1] // rank - 1
    rows = [first_rows, *[(n - first_rows) // others] * others] if others else [n]
    for token, slot in enumerate(_slots(decode_meta, row_state, len(b))):
        if slot:
            halves = zip(b[slot - 1].split(rows), h[token].split(rank), strict=True)
            product = torch.cat([linear(own[None], weight)[0] for weight, own in halves])
            out[token] = _wide(out[token]) + _wide(product)


def lora_expand(
    out: Tensor,
    h: Tensor,
    b: Tensor,
    decode_meta: Tensor,
    row_state: Tensor,
    first_rows: int,
) -> Tensor:
    """As :func:`photon_ext.ops.lora_expand`: a new [T, n]."""
    total = out.clone()
    lora_expand_(total, h, b, decode_meta, row_state, first_rows)
    return total


def lora_link_(
    x: Tensor,
    decode_meta: Tensor,
    row_state: Tensor,
    before: Tensor | None = None,
    b: Tensor | None = None,
    first_rows: int = 0,
    eps: float | None = None,
    act: Tensor | None = None,
    after: Tensor | None = None,
    a: Tensor | None = None,
    norm_weight: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """As :func:`photon_ext.ops.lora_link_`; the sums are of any dtype."""
    x = x if act is None else x.clone()
    if b is not None and before is not None:
        sums = before.sum(0)
        h, square = sums[:, :-LINK_SPARE], sums[:, -LINK_SPARE, None]
        h = h if eps is None else h * torch.rsqrt(square + eps)
        lora_expand_(x, h.to(x.dtype), b, decode_meta, row_state, first_rows)
    if act is not None:
        silu_mul_into(act, x)
    if a is None or after is None:
        return
    values = x if act is None else act
    scaled = values if norm_weight is None else values * norm_weight
    for token, slot in enumerate(_slots(decode_meta, row_state, len(a))):
        for chunk in range(len(after)) if slot else ():
            own = slice(chunk * LINK_COLUMNS, (chunk + 1) * LINK_COLUMNS)
            rows, row = _wide(a[slot - 1, :, own]), _wide(scaled[token, own])
            after[chunk, token, :-LINK_SPARE] = rows @ row
            if norm_weight is not None:
                square = _wide(values[token, own]).square().sum() / values.shape[1]
                after[chunk, token, -LINK_SPARE] = square


# --- spatial --------------------------------------------------------------------------------------


def _side(bin_: Tensor, bins: int) -> Tensor:
    return torch.exp2(10 * bin_.double() / (bins - 1) - 10)


def spatial_features_into(
    out: Tensor, decode_meta: Tensor, coordinate: Tensor, size: Tensor, vocab: int, bins: int
) -> None:
    """As :func:`photon_ext.ops.spatial_features_into`: out [T, width] is written."""
    value = decode_meta[:, Meta.TOKEN].long() - vocab
    live = (decode_meta[:, Meta.LENGTH] > 0) & (value >= 0)
    is_coordinate = (live & (value < bins))[:, None]
    pair = value - bins
    is_size = (live & (pair >= 0) & (pair < bins * bins))[:, None]
    sides = torch.stack([_side(pair // bins, bins), _side(pair % bins, bins)], dim=1)
    parts = []
    for turns, known in (
        (value.double()[:, None] / bins * coordinate.double(), is_coordinate),
        (sides @ size.double(), is_size),
    ):
        angle = 2 * torch.pi * turns
        parts.append(torch.cat([angle.cos(), angle.sin()], dim=1).masked_fill(~known, 0))
    features = torch.cat([*parts, is_coordinate, is_size], dim=1)
    out.zero_()
    out[:, : features.shape[1]] = features


def choose_value_(
    sampled: Tensor, logits: Tensor, segments: Tensor, tables: Sequence[Tensor], vocab: int
) -> None:
    """As :func:`photon_ext.ops.choose_value_`: sampled [R] is updated."""
    row_state, stop_ids = tables[DeltaTable.ROW_STATE], tables[DeltaTable.STOP_IDS]
    known = logits.masked_fill(logits.isnan(), -torch.inf)
    coordinate, width, height = known.split(logits.shape[1] // 3, dim=1)
    for r, (row, _, tokens, flags) in enumerate(segments.tolist()):
        token = int(sampled[r])
        if not (flags & SegmentFlag.SAMPLE and _is_alive(row_state, row)) or token < 0:
            continue
        words = row_state[row].tolist()
        values = words[RowColumn.OBJECT_VALUES]
        made = words[RowColumn.POSITION] + tokens - words[RowColumn.ANSWER_BEGIN]
        if not 1 <= values <= 3 or made < 0:
            continue
        stops = stop_ids[row, : max(0, words[RowColumn.STOP_COUNT])].tolist()
        if made % values == 0 and token in stops:
            continue
        asked = (width[r], height[r]) if made % values == 2 else (coordinate[r],)
        found = [int(part.argmax()) if float(part.max()) > -torch.inf else -1 for part in asked]
        size, bins = len(asked) == 2, logits.shape[1] // 3
        value = bins + found[0] * bins + found[-1] if size else found[0]
        sampled[r] = -1 if min(found) < 0 else vocab + value


# --- attention ------------------------------------------------------------------------------------


def _places(
    decode_meta: Tensor, page_table: Tensor | None, cache: Tensor, token_index: int
) -> tuple[Tensor, Tensor]:
    """Pages and tokens in them of the positions 0 .. length - 1 of a token's row; page -1 where
    the page table has none.
    """
    length, row = (
        int(decode_meta[token_index, Meta.LENGTH]),
        int(decode_meta[token_index, Meta.ROW]),
    )
    num_pages, page_size = cache.shape[:2]
    positions = torch.arange(length, device=decode_meta.device)
    if page_table is None:
        return torch.full_like(positions, row), positions
    pages = page_table[row].long()[positions // page_size]
    return pages.where((pages >= 0) & (pages < num_pages), NO_PAGE), positions % page_size


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """Heads [..., head_dim] as keys and values in fp8: float8_e4m3fn of the same shape, and the
    scales of the heads, float32 [...]: the largest magnitude / 448.
    """
    wide = x.float()
    largest = wide.abs().amax(-1)
    scale = largest / torch.full_like(largest, FP8_MOST)  # by a number, CUDA would not divide
    numbers = (wide / scale[..., None]).where(scale[..., None] != 0, 0.0)
    return numbers.clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn), scale


def dequantize_heads(codes: Tensor, scale: Tensor) -> Tensor:
    """The numbers that quantize_heads() stored, float32 [..., head_dim]."""
    return codes.float() * scale[..., None]


def _put_heads(
    cache: Tensor, kv_scale: Tensor | None, which: int, place: tuple[Tensor, Tensor], heads: Tensor
) -> None:
    """A token's heads into its place; `which`: 0 keys, 1 values."""
    if kv_scale is None:
        cache[place] = heads
        return
    codes, scale = quantize_heads(heads)
    page, token = place
    cache.view(torch.uint8)[place] = codes.view(torch.uint8)
    kv_scale[page, which, :, token] = scale


def _heads_at(
    cache: Tensor, kv_scale: Tensor | None, which: int, places: tuple[Tensor, Tensor]
) -> Tensor:
    """[positions, KV heads, head_dim], wide."""
    if kv_scale is None:
        return _wide(cache[places])
    codes = cache.view(torch.uint8)[places].view(cache.dtype)
    pages, tokens = places
    return dequantize_heads(codes, kv_scale[pages, which, :, tokens])


def _decode_tokens(counts: Tensor | None, otherwise: int) -> int:
    """How many leading tokens of a step are decode tokens; `otherwise` without counts."""
    return otherwise if counts is None else max(0, int(counts[Count.DECODE_TOKENS]))


def _rotate(x: Tensor, norm: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """One token's heads [heads, head_dim], normalized (if norm is given) and rotated by its
    position's angles [head_dim].
    """
    wide = _wide(x if norm is None else rms_norm(x, norm, eps))
    half = x.shape[-1] // 2
    turned = torch.cat([-wide[:, half:], wide[:, :half]], dim=-1)
    return (wide * cos + turned * sin).to(x.dtype)


def rope_append_kv_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    decode_meta: Tensor,
    page_table: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    counts: Tensor | None = None,
    kv_scale: Tensor | None = None,
) -> None:
    """As :func:`photon_ext.ops.rope_append_kv_`: q is updated, and both caches at the live tokens'
    places; cos and sin may be float64.

    Where the kernels skip a token, here a position beyond cos or the page table, or a row beyond
    its table, is an IndexError.
    """
    for token_index in range(_decode_tokens(counts, 0), len(q)):
        if decode_meta[token_index, Meta.LENGTH] <= 0:
            continue
        position = int(decode_meta[token_index, Meta.POSITION])
        pages, tokens = _places(decode_meta, page_table, k_cache, token_index)
        angles, page = (cos[position], sin[position]), pages[position]
        q[token_index] = _rotate(q[token_index], q_norm, *angles, eps)
        if page == NO_PAGE:
            continue
        place, key = (page, tokens[position]), _rotate(k[token_index], k_norm, *angles, eps)
        _put_heads(k_cache, kv_scale, 0, place, key)
        _put_heads(v_cache, kv_scale, 1, place, v[token_index])


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    decode_meta: Tensor,
    segments: Tensor,
    page_table: Tensor | None,
    scale: float,
    hopper: bool = False,
    kv_scale: Tensor | None = None,
) -> Tensor:
    """As :func:`photon_ext.ops.paged_attention`: a new tensor of the shape and dtype of q.

    `segments` and `hopper` change nothing; positions of a page that is none are left out. A row
    beyond its table, or a length beyond the row's pages, is an IndexError.
    """
    del segments, hopper  # a token's own row and length say what it sees
    out = torch.zeros_like(q)
    group = q.shape[1] // k_cache.shape[2]
    for token_index in range(len(q)):
        if decode_meta[token_index, Meta.LENGTH] <= 0:
            continue
        pages, tokens = _places(decode_meta, page_table, k_cache, token_index)
        places = pages[pages != NO_PAGE], tokens[pages != NO_PAGE]
        # [positions, q heads, head_dim]
        keys = _heads_at(k_cache, kv_scale, 0, places).repeat_interleave(group, dim=1)
        values = _heads_at(v_cache, kv_scale, 1, places).repeat_interleave(group, dim=1)
        query = _wide(q[token_index])
        scores = torch.einsum("hd,lhd->hl", query, keys.to(query.dtype)) * scale
        weights = scores.softmax(-1)
        out[token_index] = torch.einsum("hl,lhd->hd", weights, values.to(query.dtype)).to(q.dtype)
    return out


def chunk_plan_into(
    plan: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    decode_meta: Tensor,
    page_table: Tensor | None,
    workspace: Tensor,
    counts: Tensor | None = None,
    kv_scale: Tensor | None = None,
    exact: bool = False,
) -> None:
    """As :func:`photon_ext.ops.chunk_plan_into` where no kernel reads a plan: nothing."""


def paged_attention_into(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    decode_meta: Tensor,
    segments: Tensor,
    page_table: Tensor | None,
    scale: float,
    hopper: bool = False,
    counts: Tensor | None = None,
    workspace: Tensor | None = None,
    pdl: bool = False,
    kv_scale: Tensor | None = None,
    plan: Tensor | None = None,
    exact: bool = False,
) -> None:
    """As :func:`photon_ext.ops.paged_attention_into`: out is written by :func:`paged_attention`,
    but for the decode tokens that counts tell. `workspace`, `pdl`, `plan` and `exact` change
    nothing.
    """
    del workspace, pdl, plan, exact
    own = slice(_decode_tokens(counts, 0), None)
    out[own] = paged_attention(
        q[own], k_cache, v_cache, decode_meta[own], segments, page_table, scale, hopper, kv_scale
    )


def fused_attention_decode_into(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    decode_meta: Tensor,
    page_table: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    workspace: Tensor | None = None,
    hopper: bool = False,
    pdl: bool = False,
    counts: Tensor | None = None,
    batch: bool = False,
    kv_scale: Tensor | None = None,
) -> None:
    """As :func:`photon_ext.ops.fused_attention_decode_into`: out is written, and both caches at the
    live tokens' places, both of the decode tokens alone that counts tell.

    `workspace`, `hopper`, `pdl` and `batch` change nothing; a token whose own page is none comes to
    zeros; errors are those of :func:`rope_append_kv_` and :func:`paged_attention`.
    """
    del workspace, hopper, pdl, batch  # the order of sums, and where kernels keep them
    own = slice(_decode_tokens(counts, len(q)))
    out, rotated, k, v, decode_meta = out[own], q[own].clone(), k[own], v[own], decode_meta[own]
    caches = k_cache, v_cache, decode_meta
    rope_append_kv_(
        *(rotated, k, v, *caches, page_table, cos, sin, q_norm, k_norm, eps), kv_scale=kv_scale
    )
    no_segments = decode_meta.new_empty(0, 4)
    paged_attention_into(
        *(out, rotated, *caches, no_segments, page_table, scale), kv_scale=kv_scale
    )
    for token_index in range(len(rotated)):
        position = int(decode_meta[token_index, Meta.POSITION])
        if decode_meta[token_index, Meta.LENGTH] > 0:
            pages, _ = _places(decode_meta, page_table, k_cache, token_index)
            out[token_index] *= float(pages[position] != NO_PAGE)
