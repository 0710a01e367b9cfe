"""Lines that change with each request, and lines that do not; what is remembered of chats."""

import pytest

from kvarn.chats.answer import Reader
from kvarn.engine.difference import Kind
from kvarn.server.changing import LONGEST, MOST_LINE, kind_of, line_at, masked
from kvarn.server.outlines import MOST, MOST_READ, MOST_STAMPS, SIZE, Earlier, Outline, _stamps, outline_of
from kvarn.server.records import Records
from kvarn.server.talk import Talk


def kind(ours: str, theirs: str) -> Kind | None:
    """They differ at the first character that is not the same."""
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    before, now = (Outline(b"", b"", 0, b"", stamps=b"".join(_stamps({"content": line}))) for line in (theirs, ours))
    return kind_of(ours, at, at) if Earlier(now, [before]).restamped(ours, opened=False) else None


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
        ("nonce=123456", "nonce=a1b2c3", Kind.COUNTER),
        ("req_011CSHoEeqs5C35K2UUqR7Fy", "req_02aaSHoEeqs5C35K2UUqR7Fy", Kind.HASH),
        ("You are kind.", "You are brief.", None),
        ("Use tabs.", "Use spaces.", None),
        ("version 2 beta", "version two beta", None),
        ("call me Al", "call me 10:15", None),
        ("call me 10:15", "call me Al", None),
        ("You are GPT 4 of a firm", "You are GPT 5 of mine", None),
        ("Monday is your name", "Friday is a good day", None),
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
    reader.push("c")
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


def test_white_space_is_part_of_a_turn() -> None:
    """A client that strips an answer has changed it."""
    plain, space = (outline_of(talk(("user", text))) for text in ("a", "a "))
    assert plain.same_turns(space) == 0


def test_a_long_line_is_masked_in_no_time() -> None:
    assert masked("9" * MOST_LINE) == "\0"
    assert masked("9" * (MOST_LINE - 1) + "a") is not None
    assert masked("9" * (MOST_LINE + 1)) is None
    assert masked("It may rain.") is None


def test_lines_that_are_remembered_are_limited() -> None:
    many = outline_of(talk(("system", "\n".join(f"line {i}" for i in range(1000)))))
    assert len(many.stamps) == MOST_STAMPS * 2 * SIZE
    long = outline_of(talk(("system", "x" * MOST_READ + "\nline 7")))
    assert long.stamps == b""


def test_chats_of_the_same_key_and_salt_are_compared() -> None:
    records = Records(most=3)
    chats = [outline_of(talk(*[("user", str(i)) for i in range(n)]), b"salt") for n in (1, 2, 3, 4)]
    for i, each in enumerate(chats):
        records.add(f"id{i}", b"alice", {}, outline=each)
    assert records.outlines(b"alice", b"salt") == [chats[3], chats[2], chats[1]]
    assert records.outlines(b"alice", b"pepper") == []
    assert records.outlines(b"bob", b"salt") == []
    assert records.outline("id0", b"alice") is None, "dropped: it was the oldest"
    assert records.outline("id3", b"alice") == chats[3]
    assert records.outline("id3", b"bob") is None


def test_no_key_pushes_out_all_records_of_another() -> None:
    records = Records(most=8)
    records.add("old", b"alice", {"id": "old"}, "mine")
    for i in range(100):
        records.add(str(i), b"bob", {"id": str(i)}, f"request {i}")
    assert records.get("old", b"alice") == records.get("mine", b"alice") == {"id": "old"}
    assert [each["id"] for each in records.recent(b"bob")] == [str(i) for i in range(99, 92, -1)]
    assert (records.get("request 92", b"bob"), records.get("99", b"alice")) == (None, None)


def test_a_turn_is_unchanged_if_a_chat_has_it_and_is_longer() -> None:
    now = outline_of(talk(("user", "a"), ("assistant", "b"), ("user", "c")))
    then = outline_of(talk(("user", "a"), ("assistant", "b")))._replace(n_tokens=10)
    earlier = Earlier(now, [then])
    assert earlier.unchanged(1, at=8)
    assert not earlier.unchanged(1, at=9), "all of it was reused: the last token is never in the cache"
    assert not earlier.unchanged(2, at=8)
    assert not Earlier(now, [then._replace(settings=b"other")]).unchanged(1, at=8)
    assert Earlier(now, [then._replace(tools=b"other")]).other_tools()
    assert not earlier.other_tools()
