"""A paged scheduler of your own: who is in each step, which pages hold whose keys and values, and
who leaves when there are no more.

python -m photon_ext.examples.paged_scheduler --pages 12

What it reads of a row. All of it counts what is launched, and so runs ahead of what is committed:

    row.wants_prefill   some of its prompt is not launched yet
    row.wants_decode    its prompt is launched, and steps in flight do not reach its cap yet
    row.next_position   where the next token's key and value go
    row.capacity        positions that its pages have: a plan that goes beyond is refused
"""

from __future__ import annotations

import argparse
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from photon_ext import Chunk, PageAppend, Pipeline, RowParams, Runtime, StepPlan, StepTensors, ops
from photon_ext.runtime import Row

VOCAB, HEADS, HEAD_DIM, MAX_LEN, PAGE, CHUNK = 96, 4, 16, 64, 4, 8
SYSTEM = [3, 5, 7, 11, 13, 17, 19, 23]  # two pages that all prompts begin with
PROMPTS = ([*SYSTEM, 31], [*SYSTEM, 37, 41, 43], [*SYSTEM, 47, 53], [*SYSTEM, 59, 61, 67, 71, 73])


class Model:
    """One layer of attention with random weights, over pages of keys and values."""

    def __init__(self, num_pages: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        width = HEADS * HEAD_DIM

        def weight(rows: int) -> torch.Tensor:
            return torch.randn(rows, width, generator=generator).to(device) / math.sqrt(width)

        self.embedding, self.qkv, self.out, self.head = map(
            weight, (VOCAB, 3 * width, width, VOCAB)
        )
        self.keys, self.values = torch.zeros(2, num_pages, PAGE, HEADS, HEAD_DIM, device=device)
        frequencies = 100.0 ** -(torch.arange(0, HEAD_DIM, 2, device=device).repeat(2) / HEAD_DIM)
        angles = torch.arange(MAX_LEN, device=device)[:, None] * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, step: StepTensors) -> None:
        """Decode tokens and parts of prompts alike: positions and pages are read on the device."""
        meta, pages = step.decode_meta, step.page_table
        x = ops.embedding(meta, self.embedding)
        q, k, v = ops.linear(x, self.qkv).view(-1, 3, HEADS, HEAD_DIM).unbind(1)
        ops.rope_append_kv_(q, k, v, self.keys, self.values, meta, pages, self.cos, self.sin)
        scale = HEAD_DIM**-0.5
        heads = ops.paged_attention(q, self.keys, self.values, meta, step.segments, pages, scale)
        ops.linear_residual_(x, heads.flatten(1), self.out)
        step.logits = ops.linear(ops.select_tokens(x, step.segments), self.head)


@dataclass
class Request:
    """A prompt, and what came for it so far: a request that had to leave begins with both."""

    prompt: list[int]
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)


class Scheduler:
    """Oldest first. A row gets pages for its prompt when admitted, and then one at a time. Where
    none is free, the youngest row leaves, and goes on later.
    """

    def __init__(self, num_pages: int, max_rows: int, device: str) -> None:
        runtime = Runtime(max_rows=max_rows, max_len=MAX_LEN, page_size=PAGE, device=device)
        forward = Model(num_pages, device).forward
        self.released: list[Row] = []
        self.pipeline = Pipeline(
            runtime, forward, vocab_size=VOCAB, chunk=CHUNK, on_release=self.released.append
        )
        self.max_rows = max_rows
        self.free = list(range(num_pages))
        self.holders: Counter[int] = Counter()  # rows, by page
        self.shared: dict[tuple[int, ...], int] = {}  # the last page of a prompt's first tokens
        self.waiting: deque[Request] = deque()
        self.request_of: dict[Row, Request] = {}
        self.preempted = self.found = 0

    def run(self, requests: Sequence[Request]) -> None:
        """Serves all of them: launches step t + 1 before it commits step t."""
        self.waiting.extend(requests)
        while self.waiting or self.pipeline.busy:
            self.admit()
            launched = self.pipeline.launch(self.plan())
            if launched is None or not self.pipeline.can_launch:
                self.commit()

    def admit(self) -> None:
        """Gives rows to those who wait, as long as there are pages for their prompts."""
        while self.waiting and len(self.pipeline.rows) < self.max_rows:
            request = self.waiting[0]
            ids = request.prompt + request.tokens
            pages = []  # of the first tokens, but not of all: the last token is always fed
            for end in range(PAGE, len(ids), PAGE):
                if (page := self.shared.get(tuple(ids[:end]))) is None:
                    break
                pages.append(page)
            cached = PAGE * len(pages)
            fresh = -(-len(ids) // PAGE) - len(pages)
            if fresh + len(self.pipeline.rows) > len(self.free):  # each that runs may need one soon
                return
            pages += [self.free.pop() for _ in range(fresh)]
            self.holders.update(pages)
            params = RowParams(max_new_tokens=request.max_new_tokens - len(request.tokens))
            # grows: pages for the prompt are enough for now
            row = self.pipeline.admit(ids, params, pages, cached=cached, grows=True)
            self.request_of[row] = self.waiting.popleft()
            self.found += cached

    def plan(self) -> StepPlan:
        """The next step: a token for each row that decodes, and the next parts of prompts."""
        rows = [row for row in self.pipeline.rows if row.running]
        leaves = len(rows) < len(self.pipeline.rows)  # its pages will be free soon
        decode, appends, drains = [], [], []
        for row in filter(lambda row: row.wants_decode, rows):
            if row in drains:
                continue
            if row.next_position < row.capacity:
                decode.append(row)
            elif self.free:
                page = self.free.pop()
                self.holders[page] += 1
                appends.append(PageAppend(row, (page,)))
                decode.append(row)
            elif not leaves:  # the tokens in flight of who drains still come
                drains, leaves = [rows[-1]], True
        chunks, budget = [], CHUNK
        for row in rows:
            tokens = min(budget, len(row.prompt_ids) - row.prefilled)
            if row.wants_prefill and tokens and row not in drains:
                chunks.append(Chunk(row, tokens))
                budget -= tokens
        self.preempted += len(drains)
        return StepPlan(tuple(decode), tuple(chunks), tuple(appends), tuple(drains))

    def commit(self) -> None:
        """Takes a step's tokens, and then what rows leave behind that no step uses any more."""
        for event in self.pipeline.commit():
            self.request_of[event.row].tokens.extend(event.tokens)
            prompt = event.row.prompt_ids  # committed with its first token: others may read it
            for number, page in enumerate(event.row.pages[: len(prompt) // PAGE], 1):
                self.shared.setdefault(prompt[: number * PAGE], page)
        for row in self.released:
            self.holders.subtract(row.pages)
            unused = {page for page in row.pages if not self.holders[page]}
            self.free += unused
            self.shared = {ids: page for ids, page in self.shared.items() if page not in unused}
            request = self.request_of.pop(row)
            if len(request.tokens) < request.max_new_tokens:  # it was preempted
                self.waiting.appendleft(request)
        self.released.clear()


def main(argv: Sequence[str] | None = None) -> None:
    """Answers four prompts with few pages, and each alone."""
    parser = argparse.ArgumentParser(description="A paged scheduler.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pages", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=16)
    options = parser.parse_args(argv)

    def answer(pages: int, prompts: Sequence[list[int]]) -> tuple[Scheduler, list[list[int]]]:
        requests = [Request(prompt, options.new_tokens) for prompt in prompts]
        scheduler = Scheduler(pages, len(prompts), options.device)
        scheduler.run(requests)
        return scheduler, [request.tokens for request in requests]

    most = -(-(max(map(len, PROMPTS)) + options.new_tokens - 1) // PAGE)
    if options.pages < most:
        parser.error(f"--pages is {options.pages}; one of the prompts alone needs {most}")
    scheduler, together = answer(options.pages, PROMPTS)
    for tokens in together:
        print(*tokens)
    print(f"preempted: {scheduler.preempted}, tokens in shared pages: {scheduler.found}")
    print("each alone gives the same:", together == [answer(most, [p])[1][0] for p in PROMPTS])


if __name__ == "__main__":
    main()
