"""Vocabularies: text -> numbers -> the same text, files that can be read, and other people's that cannot."""

import sys

import numpy as np
import pytest
from gluon_mgpu.data import BOS, EOS, PAD, UNK, build_vocabulary, check_vocabulary, korean_numbers, load_vocabulary, normalise
from gluon_mgpu.data.text.subwords import SubwordVocabulary
from gluon_mgpu.data.text.vocabulary import SPECIAL
from gluon_mgpu.data.text.words import ListedVocabulary, join_words, split_words
from gluon_mgpu.errors import DataError, MissingExtraError
from hypothesis import given
from hypothesis import strategies as st

from .conftest import assert_house_style

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
    if kind == "subwords":
        pytest.importorskip("sentencepiece")
        return build_vocabulary(texts, kind, **{"size": 60, "character_coverage": 1.0, **options})
    return build_vocabulary(texts, kind, **options)


@pytest.fixture(params=KINDS)
def vocabulary(request):
    return build(SENTENCES, request.param, **({"size": 120} if request.param == "subwords" else {}))


def test_special_tokens_have_fixed_numbers(vocabulary):
    assert (PAD, BOS, EOS, UNK) == (0, 1, 2, 3)
    assert vocabulary.tokens([PAD, BOS, EOS, UNK]) == ["<pad>", "<bos>", "<eos>", "<unk>"] == list(SPECIAL)


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


def test_names_of_special_tokens_are_text_like_any_other(vocabulary):
    assert not {PAD, BOS, EOS} & set(vocabulary.encode("<pad> <bos> <eos>"))


@pytest.mark.parametrize("number", [-1, 10**6])
def test_numbers_of_other_vocabularies_are_told(vocabulary, number):
    for read in (vocabulary.decode, vocabulary.tokens):
        with pytest.raises(DataError, match=f"got {number} for a vocabulary of {len(vocabulary)}") as caught:
            read([5, number])
        assert_house_style(caught.value)


def test_a_saved_vocabulary_is_the_same_when_loaded(vocabulary, tmp_path):
    vocabulary.save(tmp_path / "vocabulary")
    loaded = load_vocabulary(tmp_path / "vocabulary")
    everything = range(len(vocabulary))
    assert type(loaded) is type(vocabulary) and loaded.kind == vocabulary.kind
    assert loaded.tokens(everything) == vocabulary.tokens(everything)
    assert [loaded.encode(text) for text in SENTENCES] == [vocabulary.encode(text) for text in SENTENCES]
    check_vocabulary(loaded, vocabulary.config())


def test_files_of_lists_are_plain_text(tmp_path):
    build_vocabulary(["가 나 가"], "characters").save(tmp_path / "vocabulary")
    lines = (tmp_path / "vocabulary").read_text(encoding="utf-8").split("\n")
    assert lines == ["gluon_mgpu vocabulary of characters", "<pad>", "<bos>", "<eos>", "<unk>", " ", "가", "나", ""]


def test_frequent_tokens_come_first_and_rare_ones_not_at_all():
    texts = ["b a b", "c b a", "d"]
    vocabulary = build_vocabulary(texts, "words")
    assert vocabulary.tokens(range(4, len(vocabulary))) == ["b", "a", "c", "d"]
    assert len(build_vocabulary(texts, "words", size=6)) == 6
    assert len(build_vocabulary(texts, "words", min_count=2)) == 6
    assert build_vocabulary(texts, "words", size=6).encode("a b c d") == [5, 4, UNK, UNK]


def test_words_know_where_no_space_was():
    assert split_words('He said, "twenty-five."') == ["He", "said", "￭,", '"￭', "twenty", "￭-￭", "five", "￭.", '￭"']
    assert split_words("a ( b ) c") == ["a", "(", "b", ")", "c"]
    assert split_words("don't") == ["don", "￭'￭", "t"]


@given(st.text(max_size=30))
def test_any_text_comes_back_from_its_words(text):
    text = normalise(text.replace("￭", ""))
    assert join_words(split_words(text)) == text


@given(TEXT, st.sampled_from(["words", "characters"]))
def test_any_known_text_comes_back_from_its_numbers(text, kind):
    vocabulary = build_vocabulary([text, "a"], kind)
    assert vocabulary.decode(vocabulary.encode(text)) == normalise(text)


@pytest.fixture(scope="module")
def subwords():
    pairs = korean_numbers(400)
    return build([*pairs.source, *pairs.target], "subwords", size=300)


def test_subwords_are_longer_than_characters(subwords):
    texts = korean_numbers(200, 1).target
    assert sum(len(subwords.encode(text)) for text in texts) < sum(map(len, texts)) / 2
    assert 100 < len(subwords) <= 300


@given(
    st.lists(st.sampled_from(["이십", "삼백", "만", "two", "hundred", "thirty-five", "a.m.", "fi", ",", "일"]), max_size=12),
    st.booleans(),
)
def test_any_text_of_known_characters_comes_back_from_its_subwords(subwords, words, spaced):
    text = (" " if spaced else "").join(words)
    assert subwords.decode(subwords.encode(text)) == text


def test_the_same_text_gives_the_same_subwords(subwords):
    pairs = korean_numbers(400)
    assert build([*pairs.source, *pairs.target], "subwords", size=300).config() == subwords.config()


def test_too_few_subwords_for_the_characters_are_told():
    with pytest.raises(DataError, match="^build_vocabulary: got 5 sentences for 10 subwords") as caught:
        build(SENTENCES, "subwords", size=10)
    assert_house_style(caught.value)


def test_a_model_with_other_special_tokens_is_told(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    path = tmp_path / "foreign"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_prefix=str(path), vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    with pytest.raises(DataError, match=r"at -1, 1, 2 and 0; expected 0, 1, 2 and 3") as caught:
        load_vocabulary(tmp_path / "foreign.model")
    assert_house_style(caught.value)


def test_without_sentencepiece_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    for make in (lambda: build_vocabulary(["a"]), lambda: SubwordVocabulary(b"")):
        with pytest.raises(MissingExtraError, match=r"pip install 'gluon_mgpu\[seq2seq\]'") as caught:
            make()
        assert_house_style(caught.value)


@pytest.mark.parametrize(
    "content, told",
    [
        ("gluon_mgpu vocabulary of words\n", "first tokens"),
        ("gluon_mgpu vocabulary of words\n<pad>\n<bos>\n<eos>\na\n", "first tokens"),
        ("gluon_mgpu vocabulary of words\n<pad>\n<bos>\n<eos>\n<unk>\na\nb\na\n", "'a' as token 4"),
        ("gluon_mgpu vocabulary of words\n<pad>\n<bos>\n<eos>\n<unk>\na b\n", "'a b'"),
        ("gluon_mgpu vocabulary of words\n<pad>\n<bos>\n<eos>\n<unk>\n\n", "''"),
        ("gluon_mgpu vocabulary of characters\n<pad>\n<bos>\n<eos>\n<unk>\nab\n", "'ab'"),
        ("gluon_mgpu vocabulary of letters\n<pad>\n<bos>\n<eos>\n<unk>\na\n", "'letters'"),
        (b"gluon_mgpu vocabulary of words\n<pad>\n<bos>\n<eos>\n<unk>\na\n" + b"\xff\n", "line 7"),
    ],
)
def test_damaged_files_are_told(tmp_path, content, told):
    path = tmp_path / "vocabulary"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=told) as caught:
        load_vocabulary(path)
    assert str(path) in str(caught.value)
    assert_house_style(caught.value)


@pytest.mark.parametrize("content", [b"", b"hello\n", b"\nhello"])
def test_files_of_something_else_are_told(tmp_path, content):
    pytest.importorskip("sentencepiece")
    (tmp_path / "vocabulary").write_bytes(content)
    with pytest.raises(DataError, match="^load_vocabulary: got .*vocabulary") as caught:
        load_vocabulary(tmp_path / "vocabulary")
    assert_house_style(caught.value)


def test_a_vocabulary_that_does_not_fit_is_told():
    trained = build_vocabulary(["a b c"], "words").config()
    assert trained["size"] == 7
    for text, kind, told in (("a b", "words", "size 6"), ("a b d", "words", "fingerprint"), ("a b c", "characters", "kind")):
        with pytest.raises(DataError, match=f"^check_vocabulary: got target.txt with .*{told}") as caught:
            check_vocabulary(build_vocabulary([text], kind), trained, "target.txt")
        assert_house_style(caught.value)
    with pytest.raises(DataError, match="fingerprint None"):
        check_vocabulary(build_vocabulary(["a b c"], "words"), {"kind": "words", "size": 7})


def test_the_order_of_tokens_matters_to_the_fingerprint():
    configs = [ListedVocabulary("words", tokens).config() for tokens in (["a", "b"], ["b", "a"])]
    assert configs[0]["fingerprint"] != configs[1]["fingerprint"]


@pytest.mark.parametrize(
    "texts, options, told",
    [
        (["a"], {"kind": "letters"}, "kind='letters'"),
        ([], {"kind": "words"}, "no text"),
        (["  "], {"kind": "words"}, "no text"),
        (["a"], {"kind": "words", "size": 4}, "size=4"),
        (["a"], {"kind": "words", "size": 5.5}, "size=5.5"),
        (["a"], {"kind": "words", "min_count": 0}, "min_count=0"),
        ("a text", {"kind": "words"}, "texts='a text'; expected sentences"),
        (5, {"kind": "words"}, "texts=5; expected sentences"),
        (["a"], {"character_coverage": 1.5}, "character_coverage=1.5"),
        (["a"], {"character_coverage": "all"}, "character_coverage='all'"),
    ],
)
def test_bad_arguments_are_told(texts, options, told):
    with pytest.raises(DataError, match=f"^build_vocabulary: got {told}") as caught:
        build_vocabulary(texts, **options)
    assert_house_style(caught.value)
