"""The text of an answer as it grows: nothing of a stop string is shown, and characters are whole."""

from support.vocabularies import bpe

from kvarn.text.stream import TextStream
from kvarn.text.tokenizer import Tokenizer


def pieces_of(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    """What can be taken after each token, and at the end."""
    tokenizer = Tokenizer.from_gguf(bpe(("E N", "t w")))
    stream, pieces = TextStream(tokenizer, [], stop), []
    for token in tokenizer.encode(text):
        stopped = stream.push(token)
        pieces.append(stream.take())
        if stopped:
            break
    stream.close()
    return [*pieces, stream.take()], stream


def test_a_text_stream_never_shows_the_beginning_of_a_stop_string() -> None:
    pieces, stream = pieces_of("one two END three", stop=("END",))
    assert "".join(pieces) == stream.text == "one two "
    pieces, stream = pieces_of("one two EN", stop=("END",))
    assert "".join(pieces) == stream.text == "one two EN", "held back, then found to be text"
    pieces, _ = pieces_of("größer 🦙 naïve", stop=("zzz",))
    assert "".join(pieces) == "größer 🦙 naïve"
    assert not any("\ufffd" in piece for piece in pieces)
