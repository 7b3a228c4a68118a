"""The embedded sentence pairs: endless, the same each time, and never tested on what was trained on."""

import pytest
from gluon_mgpu.data import korean_numbers
from gluon_mgpu.data.text.korean_numbers import is_held_out, spell_english, spell_native, spell_sino

THINGS = {"사과": "개", "학생": "명", "고양이": "마리", "책": "권", "자동차": "대", "나무": "그루"}


@pytest.fixture(scope="module")
def train():
    return korean_numbers(6000)


@pytest.fixture(scope="module")
def test():
    return korean_numbers(1500, seed=1, held_out=True)


def kind_of(korean):
    if korean.startswith(("오전", "오후")):
        return "time"
    return "count" if korean.endswith(tuple(THINGS.values())) else "number"


@pytest.mark.parametrize(
    "number, korean, english",
    [
        (0, "영", "zero"),
        (1, "일", "one"),
        (10, "십", "ten"),
        (11, "십일", "eleven"),
        (20, "이십", "twenty"),
        (99, "구십구", "ninety-nine"),
        (100, "백", "one hundred"),
        (325, "삼백이십오", "three hundred twenty-five"),
        (1111, "천백십일", "one thousand one hundred eleven"),
        (10000, "만", "ten thousand"),
        (10001, "만 일", "ten thousand one"),
        (12045, "만 이천사십오", "twelve thousand forty-five"),
        (200000, "이십만", "two hundred thousand"),
        (11000000, "천백만", "eleven million"),
        (100010000, "일억 일만", "one hundred million ten thousand"),
        (90000090, "구천만 구십", "ninety million ninety"),
    ],
)
def test_numbers_in_words(number, korean, english):
    assert (spell_sino(number), spell_english(number)) == (korean, english)


def test_native_numbers_before_a_counter():
    numbers = (1, 4, 9, 10, 20, 21, 30, 58, 99)
    assert [spell_native(n) for n in numbers] == ["한", "네", "아홉", "열", "스무", "스물한", "서른", "쉰여덟", "아흔아홉"]


def test_held_out_ones_are_never_trained_on(train, test):
    for seed in range(3):
        assert not set(korean_numbers(2000, seed).source) & set(test.source)
    assert not set(train.target) & set(test.target)
    assert all(map(is_held_out, test.source)) and not any(map(is_held_out, train.source))


def test_the_kinds_are_written_as_they_are_spoken(train):
    pairs = dict(train)
    assert set(pairs.items()) & {("오후 세 시 이십분", "three twenty p.m."), ("오전 열두 시", "twelve o'clock a.m.")}
    counts = {korean.split()[1]: english for korean, english in train if kind_of(korean) == "count"}
    assert len(counts) == 99
    for number in range(1, 100):
        assert counts[spell_native(number)].split()[0] == spell_english(number)
