"""A server's processes: one request's walk, and who ends with whom."""

from __future__ import annotations

from tests.serve.processes import Server, end_of, tokens_of


def test_a_request_walks_through_all_processes(server: Server) -> None:
    told = server.generated(ids=[1, 2, 3], params={"max_new_tokens": 20, "ignore_eos": True}, n=3)
    assert [len(tokens_of(told, index)) for index in range(3)] == [20, 20, 20]
    assert tokens_of(told, 0) == tokens_of(told, 1) == tokens_of(told, 2)  # greedy
    assert end_of(told) == ["length", "max_new_tokens", None]
    assert server.is_empty()
