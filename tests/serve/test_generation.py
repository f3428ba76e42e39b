"""What a reader takes of answers that have gone on without it."""

from __future__ import annotations

import asyncio
from array import array

from photon_ext.serve.contract import Delta, End, Scores
from photon_ext.serve.generation import MOST_TOKENS, Inbox

END = End("length")


def scores_of(tokens: list[int]) -> Scores:
    """Of token t: t % 3 likeliest ids, which are t."""
    counts = [token % 3 for token in tokens]
    ids = [token for token, count in zip(tokens, counts, strict=True) for _ in range(count)]
    return Scores(array("f", tokens), bytes(counts), array("i", ids), array("f", ids))


async def all_of(inbox: Inbox) -> list[list[Delta]]:
    looks = []
    while True:
        try:
            looks.append(await inbox.take())
        except StopAsyncIteration:
            return looks


def test_a_backlog_is_taken_in_pieces_with_its_scores_and_its_end_last() -> None:
    async def run() -> list[list[Delta]]:
        inbox = Inbox(0, 3, False)
        for answer in inbox.answers:
            tokens = list(range(answer.index, answer.index + MOST_TOKENS + 100))
            answer.extend(tokens, scores_of(tokens))
            answer.finish(END)
        return await all_of(inbox)

    looks = asyncio.run(run())
    assert max(sum(len(delta.tokens) for delta in look) for look in looks) == MOST_TOKENS
    for index in range(3):
        own = [delta for look in looks for delta in look if delta.index == index]
        tokens = [token for delta in own for token in delta.tokens]
        assert tokens == list(range(index, index + MOST_TOKENS + 100))
        assert [delta.end for delta in own] == [None] * (len(own) - 1) + [END]
        scores = [each for delta in own if delta.scores is not None for each in delta.scores]
        assert scores == list(scores_of(tokens))


def test_whoever_reads_a_backlog_gives_others_their_turn() -> None:
    async def run() -> tuple[int, int]:
        inbox, turns = Inbox(0, 1, False), 0
        inbox.answers[0].extend(range(20 * MOST_TOKENS))
        inbox.answers[0].finish(END)
        reading = asyncio.ensure_future(all_of(inbox))
        while not reading.done():
            turns += 1
            await asyncio.sleep(0)
        return turns, len(reading.result())

    turns, looks = asyncio.run(run())
    assert looks == 20
    assert turns >= looks


def test_what_was_not_taken_goes_with_a_cancel() -> None:
    async def run() -> list[Delta]:
        inbox = Inbox(0, 2, False)
        inbox.answers[0].extend(range(2 * MOST_TOKENS))
        inbox.answers[1].extend([5])
        first = await inbox.take()
        inbox.cancel(0)
        return first + await inbox.take()

    deltas = asyncio.run(run())
    assert [(delta.index, len(delta.tokens)) for delta in deltas] == [(0, MOST_TOKENS), (1, 1)]
