"""Vocabularies: text -> numbers -> the same text, files that can be read, and other people's that cannot."""

import numpy as np
import pytest
from gluon_mgpu.data import BOS, EOS, PAD, UNK, build_vocabulary, korean_numbers, load_vocabulary
from gluon_mgpu.data.text.pairs import normalise
from gluon_mgpu.errors import DataError
from hypothesis import given
from hypothesis import strategies as st

KINDS = ["words", "characters", "subwords"]
SENTENCES = [
    "오후 세 시 이십분, 맞아요?",
    "책이 두 권(새것) 있다...",
    'He said: "twenty-five"!',
    "① ½컵… ａ",  # which Unicode's form NFKC would change
    "don't — e.g. 3.14, a_b @home",
]
TEXT = st.text(st.sampled_from('가나 다a B1_.,-"(é\u0301\u3000\n😀'), max_size=20)


def build(texts, kind, **options):
    pytest.importorskip("sentencepiece")
    if kind == "subwords":
        return build_vocabulary(texts, kind, **{"size": 60, "character_coverage": 1.0, **options})
    return build_vocabulary(texts, kind, **options)


@pytest.fixture(params=KINDS)
def vocabulary(request):
    return build(SENTENCES, request.param, **({"size": 120} if request.param == "subwords" else {}))


def test_sentences_come_back(vocabulary):
    for text in SENTENCES:
        numbers = vocabulary.encode(text)
        assert min(numbers) > UNK and max(numbers) < len(vocabulary)
        assert vocabulary.decode(numbers) == text


def test_text_is_normalised_before(vocabulary):
    assert vocabulary.encode("  오후\u3000세 \u1109\u1175 ") == vocabulary.encode("오후 세 시")
    assert vocabulary.encode("") == vocabulary.encode(" \n") == []
    assert vocabulary.decode([]) == ""


def test_only_what_is_said_is_decoded(vocabulary):
    numbers = vocabulary.encode("오후 세 시")
    assert vocabulary.decode([BOS, *numbers, EOS, *numbers, PAD, PAD]) == "오후 세 시"
    assert vocabulary.decode(np.array([BOS, *numbers, EOS, PAD], np.float32)) == "오후 세 시"  # as MXNet's argmax gives them


def test_the_unknown_is_one_number_and_shown(vocabulary):
    assert UNK in vocabulary.encode("漢")
    assert "\ufffd" in vocabulary.decode(vocabulary.encode("漢"))


@pytest.mark.parametrize("number", [-1, 10**6])
def test_numbers_of_other_vocabularies_are_reported(vocabulary, number):
    for read in (vocabulary.decode, vocabulary.tokens):
        with pytest.raises(DataError, match=f"got {number} for a vocabulary of {len(vocabulary)}"):
            read([5, number])


def test_a_saved_vocabulary_is_the_same_when_loaded(vocabulary, tmp_path):
    vocabulary.save(tmp_path / "vocabulary")
    loaded = load_vocabulary(tmp_path / "vocabulary")
    everything = range(len(vocabulary))
    assert type(loaded) is type(vocabulary) and loaded.config() == vocabulary.config()
    assert loaded.tokens(everything) == vocabulary.tokens(everything)
    assert [loaded.encode(text) for text in SENTENCES] == [vocabulary.encode(text) for text in SENTENCES]


def test_frequent_tokens_come_first_and_rare_ones_not_at_all():
    texts = ["b a b", "c b a", "d"]
    vocabulary = build_vocabulary(texts, "words")
    assert vocabulary.tokens(range(4, 6)) == ["▁b", "▁a"] and len(vocabulary) == 8
    assert build_vocabulary(texts, "words", size=6).encode("a b c") == [5, 4, UNK]


@given(TEXT, st.sampled_from(["words", "characters"]))
def test_any_known_text_comes_back_from_its_numbers(text, kind):
    vocabulary = build_vocabulary([text, "a"], kind)
    assert vocabulary.decode(vocabulary.encode(text)) == normalise(text)


@pytest.fixture(scope="module")
def subwords():
    pairs = korean_numbers(400)
    return build([*pairs.source, *pairs.target], "subwords", size=300)


@given(
    st.lists(st.sampled_from(["이십", "삼백", "만", "two", "hundred", "thirty-five", "a.m.", "fi", "일"]), max_size=12),
    st.booleans(),
)
def test_any_text_of_known_characters_comes_back_from_its_subwords(subwords, words, spaced):
    text = (" " if spaced else "").join(words)
    assert subwords.decode(subwords.encode(text)) == text


def test_all_letters_of_korean_text_are_covered_and_rare_syllables_on_demand():
    pytest.importorskip("sentencepiece")
    texts = ["가나 다라"] * 2000 + ["Q 50% 뷁"]
    usual, whole = (build_vocabulary(texts, size=50, character_coverage=coverage) for coverage in (None, 1))
    assert usual.decode(usual.encode("50% Q 뷁")) == "50% Q \ufffd"
    assert whole.decode(whole.encode("50% Q 뷁")) == "50% Q 뷁"


@pytest.mark.parametrize(
    "texts, options, told",
    [
        (["a"], {"kind": "letters"}, "kind='letters'"),
        ([], {"kind": "words"}, "no text"),
        (["a"], {"kind": "words", "size": 4}, "size=4"),
        ("a text", {"kind": "words"}, "texts='a text'; expected a list of strings"),
        (["a"], {"character_coverage": 1.5}, "character_coverage=1.5"),
    ],
)
def test_bad_arguments_are_reported(texts, options, told):
    with pytest.raises(DataError, match=f"^build_vocabulary: got {told}"):
        build_vocabulary(texts, **options)
