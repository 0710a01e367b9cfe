"""Lines that change with each request, and lines that do not; what is remembered of chats."""

import pytest

from kvarn.chats.answer import Reader
from kvarn.engine.difference import Kind
from kvarn.server.changing import LONGEST, kind_of, line_at
from kvarn.server.outlines import MOST, SIZE, Outline, outline_of
from kvarn.server.records import Records
from kvarn.server.talk import Talk


def kind(ours: str, theirs: str) -> Kind | None:
    """They differ at the first character that is not the same."""
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    return kind_of((ours, at), (theirs, at))


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ("now 09:15", "now 09:16", Kind.CLOCK),
        ("now 9:15 PM", "now 8:15 PM", Kind.CLOCK),
        ("2026-11-16T10:41:07Z", "2026-11-16T10:42:07Z", Kind.CLOCK),
        ("2026-11-16T10:41:07Z", "2026-11-17T10:41:07Z", Kind.DATE),
        ("Date: 16.11.2026", "Date: 17.11.2026", Kind.DATE),
        ("Today Date: 16 Nov 2026", "Today Date: 17 Nov 2026", Kind.DATE),
        ("November 16, 2026", "November 17, 2026", Kind.DATE),
        ("It is Monday.", "It is Friday.", Kind.DATE),
        ("turn 8", "turn 9", Kind.COUNTER),
        ("turn 9", "turn 10", Kind.COUNTER),
        ("nonce=5f2e91", "nonce=a1b2c3", Kind.HASH),
        ("nonce=123456", "nonce=a1b2c3", Kind.HASH),
        ("req_011CSHoEeqs5C35K2UUqR7Fy", "req_02aaSHoEeqs5C35K2UUqR7Fy", Kind.HASH),
        ("You are kind.", "You are brief.", None),
        ("Use tabs.", "Use spaces.", None),
        ("version 2 beta", "version two beta", None),
        ("call me Al", "call me 10:15", None),
    ],
)
def test_kinds_of_lines(ours: str, theirs: str, expected: Kind | None) -> None:
    assert kind(ours, theirs) is expected


def test_a_line_is_cut_around_its_difference() -> None:
    text = "a" * 5000 + "X" + "b" * 5000
    line, at = line_at(text, 5000)
    assert (len(line), line[at]) == (LONGEST, "X")
    assert line_at("one\ntwo\nthree", 5) == ("two", 1)
    assert line_at("one\n", 4) == ("", 0)


def talk(*messages: tuple[str, str]) -> Talk:
    return Talk([{"role": role, "content": content} for role, content in messages])


def test_outlines_have_the_turns_in_common() -> None:
    first = outline_of(talk(("system", "a"), ("user", "b")))
    reader = Reader()
    reader.push("c ")
    answered = first.answered(reader)
    onward = outline_of(talk(("system", "a"), ("user", "b"), ("assistant", "c"), ("user", "d")))
    other = outline_of(talk(("system", "a"), ("user", "b"), ("assistant", "x"), ("user", "d")))
    assert (first.same_turns(onward), answered.same_turns(onward), answered.same_turns(other)) == (2, 3, 2)
    assert outline_of(talk(("system", "A"), ("user", "b"))).same_turns(first) == 0
    assert (first.n_system, len(first.turns)) == (1, 2 * SIZE)
    long = outline_of(talk(*[("user", str(i)) for i in range(4000)]))
    assert len(long.turns) == MOST * SIZE
    assert long.same_turns(long) == MOST


def test_calls_are_the_same_in_other_json() -> None:
    def with_call(arguments: object) -> Outline:
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return outline_of(Talk([{"role": "assistant", "content": None, "tool_calls": [call]}]))

    assert with_call('{"a":1,  "b":2}').turns == with_call({"b": 2, "a": 1}).turns
    assert with_call("not json").turns != with_call("{}").turns
    assert with_call("[" * 5000).turns, "too deep to be read"


def test_the_nearest_chat_is_one_of_the_same_key() -> None:
    records = Records(most=3)
    chats = [outline_of(talk(*[("user", str(i)) for i in range(n)])) for n in (1, 2, 3, 4)]
    for i, each in enumerate(chats):
        records.add(f"id{i}", b"alice", {}, outline=each)
    assert records.nearest(chats[1], b"alice")[0] == 2
    assert records.nearest(chats[3], b"alice") == (4, chats[3])
    assert records.nearest(chats[3], b"bob") == (0, None)
    assert records.outline("id0", b"alice") is None, "dropped: it was the oldest"
    assert records.outline("id3", b"alice") == chats[3]
    assert records.outline("id3", b"bob") is None
