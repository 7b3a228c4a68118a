"""Scores of translations, against counting by hand."""

import math
import sys
import unicodedata
from collections import Counter

import pytest
from gluon_mgpu.errors import MissingExtraError
from gluon_mgpu.models.seq2seq.translation_scores import exact_match, has_sacrebleu, score_signatures, translation_scores

KOREAN = ["고양이 스무 마리가 있다", "오늘은 날씨가 좋다"]
NEARLY = ["고양이 스물 마리가 있다", "오늘 날씨가 좋네"]


def counted_bleu(translations, references, split):
    """BLEU of 1 to 4 tokens by counting; every precision must be positive."""
    logs, lengths = [], [sum(len(split(text)) for text in side) for side in (translations, references)]
    for n in range(1, 5):
        right = total = 0
        for one, other in zip(translations, references):
            grams = [Counter(tuple(split(text)[i : i + n]) for i in range(len(split(text)) - n + 1)) for text in (one, other)]
            right += sum((grams[0] & grams[1]).values())
            total += sum(grams[0].values())
        logs.append(math.log(right / total))
    return 100 * math.exp(min(0, 1 - lengths[1] / lengths[0]) + sum(logs) / 4)


def test_exact_match_counts_whole_sentences():
    assert exact_match(["a b", "a c", " a  b ", "A b"], ["a b", "a b", "a b", "a b"]) == 0.5
    assert exact_match([unicodedata.normalize("NFD", "세 시")], ["세 시"]) == 1


def test_without_sacrebleu_there_is_the_exact_match(without_sacrebleu):
    assert translation_scores(["a", "b", "c", "e"], ["a", "b", "c", "d"]) == {"exact_match": 75.0}


def test_a_sacrebleu_that_cannot_be_imported_is_named_before_the_training(monkeypatch):
    pytest.importorskip("sacrebleu")
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(MissingExtraError, match="sacrebleu.*'seq2seq'"):
        has_sacrebleu()


def test_signatures_say_how_scores_were_computed(monkeypatch):
    sacrebleu = pytest.importorskip("sacrebleu")
    for references, tokenize in ((KOREAN, "char"), (["the cat"], "13a")):
        signatures = score_signatures(references)
        assert signatures["bleu"].startswith(
            f"nrefs:1|case:mixed|eff:no|tok:{tokenize}|smooth:exp|version:{sacrebleu.__version__}"
        )
        assert signatures["chrf"].startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|")
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    assert score_signatures(KOREAN) == {}


def test_korean_is_counted_in_characters_and_english_in_words():
    pytest.importorskip("sacrebleu")
    scores = translation_scores(NEARLY, KOREAN)
    assert scores["bleu"] == pytest.approx(counted_bleu(NEARLY, KOREAN, lambda text: list(text.replace(" ", ""))))
    assert scores["exact_match"] == 0
    english, other = ["the cat sat on the mat today"], ["a cat sat on the mat today ."]
    assert translation_scores(english, other)["bleu"] == pytest.approx(counted_bleu(english, other, str.split))
    assert 0 < scores["chrf"] < 100
