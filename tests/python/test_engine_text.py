"""Tokens to text, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("torch")

from kvfolio.serving.text import TextStream


class ByteTokenizer:
    """One token a byte of UTF-8; 0 is special."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        kept = [token for token in token_ids if token or not skip_special_tokens]
        return bytes(kept).decode(errors="replace")


class WordTokenizer:
    """A word's space is dropped at the beginning of a text, as sentencepiece tokenizers do."""

    words = (" good", " day", "s")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(self.words[token] for token in token_ids).removeprefix(" ")


class PairTokenizer:
    """The second token ends within a character, the third completes it."""

    words = (b"so ", b"END\xc3", b"\xbc")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return b"".join(self.words[token] for token in token_ids).decode(errors="replace")


def pieces(stream: TextStream, text: str) -> list[str]:
    out = []
    for token in text.encode():
        out.append(stream.push(token))
        if stream.stopped:
            break
    return out


def test_pieces_make_up_the_text_and_hold_whole_characters() -> None:
    text = "Gr\u00fc\u00dfe, \u4f60\u597d \U0001f30a!"
    stream = TextStream(ByteTokenizer())
    out = pieces(stream, text)
    assert "".join(out) + stream.finish() == text
    assert "\ufffd" not in "".join(out)
    assert out[:4] == ["G", "r", "", "\u00fc"]


def test_a_character_that_never_becomes_whole_comes_out_at_the_end() -> None:
    stream = TextStream(ByteTokenizer())
    assert [stream.push(token) for token in "a\u00fc".encode()[:-1]] == ["a", ""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_spaces_depend_on_the_token_before() -> None:
    stream = TextStream(WordTokenizer())
    assert [stream.push(token) for token in (0, 1, 2, 0)] == ["good", " day", "s", " good"]


def test_text_ends_before_the_stop_string_however_it_is_cut() -> None:
    stream = TextStream(ByteTokenizer(), ["END", "\n\n"])
    out = pieces(stream, "to the EN, END. More")
    assert stream.stopped
    assert "".join(out) == "to the EN, "
    assert stream.finish() == ""


def test_no_piece_shows_what_may_begin_a_stop_string() -> None:
    stream = TextStream(ByteTokenizer(), ["abc"])
    assert pieces(stream, "xababd") == ["x", "", "", "ab", "", "abd"]
    assert not stream.stopped
    assert pieces(stream, "ab") == ["", ""]
    assert stream.finish() == "ab"


def test_the_earliest_of_several_stop_strings_counts() -> None:
    stream = TextStream(WordTokenizer(), ["ay", "od"])
    assert stream.push(0) == "go"
    assert stream.stopped


def test_a_stop_string_counts_though_its_last_token_begins_a_character() -> None:
    stream = TextStream(PairTokenizer(), ["END"])
    assert [stream.push(token) for token in (0, 1)] == ["so ", ""]
    assert stream.stopped
    assert stream.finish() == ""


def test_what_comes_before_an_unfinished_character_comes_out_once() -> None:
    stream = TextStream(PairTokenizer())
    assert [stream.push(token) for token in (0, 1, 2, 0)] == ["so ", "END", "\u00fc", "so "]
    assert stream.finish() == ""


def test_a_stop_string_is_found_in_what_was_held_back() -> None:
    stream = TextStream(PairTokenizer(), ["D\ufffd"])
    assert [stream.push(token) for token in (0, 1)] == ["so ", "EN"]
    assert stream.finish() == ""
    assert stream.stopped
