"""The embedded sentence pairs: endless, the same each time, and never tested on what was trained on."""

import unicodedata
from itertools import islice

import pytest
from gluon_mgpu.data import exact_match, korean_numbers
from gluon_mgpu.data.text.korean_numbers import is_held_out
from gluon_mgpu.data.text.numerals import spell_korean_time
from gluon_mgpu.errors import DataError

from .conftest import assert_house_style
from .test_numerals import COUNTING, read_english, read_sino

COUNTERS = ("개", "명", "마리", "권", "대", "그루", "송이", "채", "장", "잔", "병", "켤레")
SINGULAR = [
    "apple",
    "student",
    "cat",
    "book",
    "car",
    "tree",
    "rose",
    "house",
    "sheet of paper",
    "cup of coffee",
    "bottle of water",
    "pair of socks",
]
PLURAL = [
    "apples",
    "students",
    "cats",
    "books",
    "cars",
    "trees",
    "roses",
    "houses",
    "sheets of paper",
    "cups of coffee",
    "bottles of water",
    "pairs of socks",
]


@pytest.fixture(scope="module")
def train():
    return korean_numbers(6000)


@pytest.fixture(scope="module")
def test():
    return korean_numbers(1500, seed=1, held_out=True)


def kind_of(korean):
    if korean.endswith("일") and "년 " in korean:
        return "date"
    if korean.startswith(("오전", "오후")):
        return "time"
    return "count" if korean.endswith(COUNTERS) else "number"


def test_more_begin_with_fewer_and_seeds_differ():
    few, many, other = korean_numbers(50, 3), korean_numbers(80, 3), korean_numbers(50, 4)
    assert list(few) == list(islice(many, 50))
    assert list(few) != list(other)
    assert len(korean_numbers(0)) == 0


def test_the_first_ones_stay_what_they_are():
    """Results that were recorded are of these; another draw would be another data set."""
    assert list(korean_numbers(3, 1)) == [
        ("사만 구천구백육십오", "forty-nine thousand nine hundred sixty-five"),
        ("학생 아흔일곱 명", "ninety-seven students"),
        ("이천칠십일년 십이월 십칠일", "December seventeenth, twenty seventy-one"),
    ]


def test_held_out_ones_are_never_trained_on(train, test):
    for seed in range(3):
        assert not set(korean_numbers(2000, seed).source) & set(test.source)
    assert not set(train.target) & set(test.target)
    assert all(map(is_held_out, test.source)) and not any(map(is_held_out, train.source))


def test_held_out_ones_are_made_of_what_was_trained_on(train, test):
    assert set("".join(test.source)) <= set("".join(train.source))
    assert set(" ".join(test.target).replace("-", " ").split()) <= set(" ".join(train.target).replace("-", " ").split())


@pytest.mark.parametrize("part", ["train", "test"])
def test_all_kinds_are_there(part, request):
    kinds = [kind_of(korean) for korean in request.getfixturevalue(part).source]
    shares = {kind: kinds.count(kind) / len(kinds) for kind in ("number", "date", "time", "count")}
    assert min(shares.values()) > 0.15, shares


def test_each_text_has_one_translation_in_both_directions(train):
    pairs = set(train)
    assert len({korean for korean, _ in pairs}) == len({english for _, english in pairs}) == len(pairs)


def test_text_is_normalised_already(train):
    for text in (*train.source, *train.target):
        assert text == unicodedata.normalize("NFC", text) == " ".join(text.split())


def test_numbers_mean_the_same_on_both_sides(train):
    numbers = [pair for pair in train if kind_of(pair[0]) == "number"]
    values = [read_sino(korean) for korean, _ in numbers]
    assert values == [read_english(english) for _, english in numbers]
    assert {len(str(value)) for value in values} == set(range(1, 9))
    assert 0 in values


def test_digits_are_as_many_as_asked_for():
    long = korean_numbers(500, max_digits=16)
    values = [read_sino(korean) for korean in long.source if kind_of(korean) == "number"]
    assert {len(str(value)) for value in values} == set(range(1, 17))
    short = korean_numbers(300, max_digits=1)
    assert {read_sino(korean) for korean in short.source if kind_of(korean) == "number"} == set(range(10))


def test_counts_use_native_numbers(train):
    counts = {korean.split()[1]: english for korean, english in train if kind_of(korean) == "count"}
    assert len(counts) == 99
    for number, native in enumerate(COUNTING, 1):
        assert read_english(counts[native].split()[0]) == number


def test_one_is_singular(train):
    counts = [(korean.split()[1], english.split(" ", 1)[1]) for korean, english in train if kind_of(korean) == "count"]
    assert {english for native, english in counts if native == "한"} <= set(SINGULAR)
    assert {english for native, english in counts if native != "한"} == set(PLURAL)


def test_a_singular_can_be_learnt():
    """It comes with one alone: were that held out, nobody could know it."""
    things = [
        "사과",
        "학생",
        "고양이",
        "책",
        "자동차",
        "나무",
        "장미",
        "집",
        "종이",
        "커피",
        "물",
        "양말",
    ]  # as many as COUNTERS, each with its own
    assert len(things) == len(COUNTERS) == len(SINGULAR)
    assert not any(is_held_out(f"{thing} 한 {counter}") for thing, counter in zip(things, COUNTERS))
    assert not any(is_held_out(spell_korean_time(13, minute)) for minute in range(60))
    assert any(is_held_out(spell_korean_time(14, minute)) for minute in range(60))


def test_exact_match_counts_whole_sentences():
    assert exact_match(["a b", "a c", " a  b ", "A b"], ["a b", "a b", "a b", "a b"]) == 0.5
    assert exact_match([unicodedata.normalize("NFD", "세 시")], ["세 시"]) == 1


@pytest.mark.parametrize(
    "options, told",
    [
        ({"num_examples": -1}, "num_examples=-1"),
        ({"num_examples": 2.5}, "num_examples=2.5"),
        ({"num_examples": 1, "seed": -1}, "seed=-1"),
        ({"num_examples": 1, "max_digits": 0}, "max_digits=0"),
        ({"num_examples": 1, "max_digits": 17}, "max_digits=17"),
    ],
)
def test_bad_arguments_are_told(options, told):
    with pytest.raises(DataError, match=f"^korean_numbers: got {told}; expected") as caught:
        korean_numbers(**options)
    assert_house_style(caught.value)


@pytest.mark.parametrize("translations, references", [([], []), (["a"], ["a", "b"])])
def test_a_score_of_nothing_is_told(translations, references):
    with pytest.raises(DataError, match="^exact_match: got") as caught:
        exact_match(translations, references)
    assert_house_style(caught.value)
