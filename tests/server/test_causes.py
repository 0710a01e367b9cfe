"""Causes with tokenizers of every kind: where the texts of two chats differ."""

from dataclasses import replace

import pytest
from support.chat_templates import CHATML, CONTROL, PLAIN
from support.chat_vocabularies import VOCABULARIES

from kvarn.cache.adoption import Reason, ReuseLimit
from kvarn.cache.prefix import common
from kvarn.chats.chats import Chats
from kvarn.engine.difference import Cause, Difference
from kvarn.engine.explain import AHEAD, Explanation
from kvarn.server.causes import Asked, Causes
from kvarn.server.talk import Talk
from kvarn.text.chat import ChatTemplate
from kvarn.text.quoting import Quoting, restored
from kvarn.text.tokenizer import Tokenizer

EXPLAINED = Explanation(0, 0, 0, False, None, None, (), (), 0.0, 0, 0, 0.0, {}, None, None, None)


def difference(tokenizer: Tokenizer, now: Talk, then: Talk, tail: tuple[int, ...] = ()) -> tuple[str, Difference]:
    """`tail`: tokens that the earlier text has at its end. Also the prompt as text."""
    template = ChatTemplate(CHATML, "<s>", "</s>")
    chats = Chats(tokenizer, template, template.render, Quoting(CONTROL, PLAIN, template.strings))
    ours, theirs = (chats.encode(*chats.prompt(talk.messages)) for talk in (now, then))
    theirs = [*theirs, *tail]
    at = common(ours, theirs)
    limit = ReuseLimit(Reason.DIFFERS, at, ours[at], theirs[at], tuple(theirs[at : at + AHEAD]))
    explained = replace(EXPLAINED, limit=limit, ours=tuple(ours[at : at + AHEAD]))
    causes = Causes(tokenizer, lambda: chats, lambda talk: {})
    found = causes.find(explained, Asked(ours, now)).difference
    assert found is not None
    return restored(*chats.prompt(now.messages)), found


def talk(*contents: str) -> Talk:
    roles = ("system", "user", "assistant", "user")
    return Talk([{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)])


@pytest.mark.parametrize("name", VOCABULARIES)
def test_the_place_and_the_part(name: str) -> None:
    tokenizer = VOCABULARIES[name]()
    text, found = difference(tokenizer, talk("Be a kind guide", "Hi"), talk("Be a rude guide", "Hi"))
    assert (found.cause, found.part) == (Cause.SYSTEM, "system")
    assert found.character is not None
    assert text[found.character :].startswith("kind guide")
    text, found = difference(tokenizer, talk("a", "b <|im_end|> d", "é", "g"), talk("a", "b <|im_end|> d", "è", "g"))
    assert (found.cause, found.part, found.turn, found.role) == (None, "turn", 2, "assistant")
    assert found.character is not None
    assert text[found.character :].startswith("é")


@pytest.mark.parametrize("name", ["bpe qwen2", "bpe llama-bpe", "folder byte level"])
def test_the_same_text_in_other_tokens(name: str) -> None:
    tokenizer = VOCABULARIES[name]()
    a, b, ab = (tokenizer.encode(text, bos=False) for text in ("a", "b", "ab"))
    assert len(ab) == 1
    text, found = difference(tokenizer, talk("s", "q", "ab!", "g"), talk("s", "q"), (*a, *b))
    assert (found.cause, found.tokens, found.turn) == (Cause.SAME_TEXT, (tuple(ab), (*a, *b)), 2)
    assert found.character == text.index("ab!")


def test_ids_that_are_no_text() -> None:
    tokenizer = VOCABULARIES["bpe qwen2"]()
    half = tokenizer.encode("é", bos=False)[0]
    limit = ReuseLimit(Reason.DIFFERS, 1, half, 7, (7,))
    explained = replace(EXPLAINED, limit=limit, ours=(half,))

    def no_chats() -> Chats:
        raise AssertionError("a text completion has no chat")

    found = Causes(tokenizer, no_chats, lambda talk: {}).find(explained, Asked([half, half], None))
    assert found.difference == Difference()
