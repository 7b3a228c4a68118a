"""Numbers, dates and times in words: literal lists, and parsers written from the other end."""

import datetime

import pytest
from gluon_mgpu.data.text.numerals import (
    LARGEST,
    spell_english,
    spell_english_date,
    spell_english_time,
    spell_korean_date,
    spell_korean_time,
    spell_native,
    spell_sino,
)
from gluon_mgpu.errors import DataError
from hypothesis import given
from hypothesis import strategies as st

from .conftest import assert_house_style

SINO = {
    0: "영",
    1: "일",
    7: "칠",
    10: "십",
    11: "십일",
    16: "십육",
    20: "이십",
    99: "구십구",
    100: "백",
    101: "백일",
    110: "백십",
    111: "백십일",
    325: "삼백이십오",
    1000: "천",
    1001: "천일",
    1100: "천백",
    1111: "천백십일",
    2024: "이천이십사",
    9999: "구천구백구십구",
    10000: "만",
    10001: "만 일",
    11111: "만 천백십일",
    12345: "만 이천삼백사십오",
    20000: "이만",
    100000: "십만",
    110000: "십일만",
    210000: "이십일만",
    1000000: "백만",
    10000000: "천만",
    12345678: "천이백삼십사만 오천육백칠십팔",
    100000000: "일억",
    100010000: "일억 일만",
    110000000: "일억 천만",
    1234567898: "십이억 삼천사백오십육만 칠천팔백구십팔",  # the orthography's own example
    10**12: "일조",
    10**12 + 1: "일조 일",
    10**15: "천조",
    LARGEST: "구천구백구십구조 구천구백구십구억 구천구백구십구만 구천구백구십구",
}
ENGLISH = {
    0: "zero",
    10: "ten",
    12: "twelve",
    19: "nineteen",
    20: "twenty",
    40: "forty",
    99: "ninety-nine",
    100: "one hundred",
    325: "three hundred twenty-five",
    1000: "one thousand",
    1015: "one thousand fifteen",
    12045: "twelve thousand forty-five",
    1000001: "one million one",
    10**9: "one billion",
    2 * 10**12: "two trillion",
    9 * 10**15: "nine quadrillion",
}
# fmt: off
NATIVE = [
    "하나", "둘", "셋", "넷", "다섯", "여섯", "일곱", "여덟", "아홉", "열",
    "열하나", "열둘", "열셋", "열넷", "열다섯", "열여섯", "열일곱", "열여덟", "열아홉", "스물", "스물하나",
]
COUNTING = [
    "한", "두", "세", "네", "다섯", "여섯", "일곱", "여덟", "아홉", "열",
    "열한", "열두", "열세", "열네", "열다섯", "열여섯", "열일곱", "열여덟", "열아홉", "스무", "스물한", "스물두",
]
# fmt: on


def read_sino(text):
    """A Sino-Korean number by the school's rule: digits wait for a power, powers for 만, 억 or 조."""
    if text == "영":
        return 0
    total = group = digit = 0
    for sign in text.replace(" ", ""):
        if sign in "일이삼사오육칠팔구":
            digit = "일이삼사오육칠팔구".index(sign) + 1
        elif sign in "십백천":
            group += (digit or 1) * {"십": 10, "백": 100, "천": 1000}[sign]
            digit = 0
        else:
            total += (group + digit or 1) * {"만": 10**4, "억": 10**8, "조": 10**12}[sign]
            group = digit = 0
    return total + group + digit


def read_english(text):
    """An English number, word by word."""
    ones = [
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
        "thirteen",
        "fourteen",
        "fifteen",
        "sixteen",
        "seventeen",
    ]
    values = {word: value for value, word in enumerate([*ones, "eighteen", "nineteen"])}
    values.update(zip(["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], range(20, 100, 10)))
    scales = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "quadrillion": 10**15}
    total = group = 0
    for word in text.replace("-", " ").split():
        if word == "hundred":
            group *= 100
        elif word in scales:
            total, group = total + group * scales[word], 0
        else:
            group += values[word]
    return total + group


@pytest.mark.parametrize("number, korean", SINO.items())
def test_sino_korean_numbers(number, korean):
    assert spell_sino(number) == korean


@pytest.mark.parametrize("number, english", ENGLISH.items())
def test_english_numbers(number, english):
    assert spell_english(number) == english


def test_the_parsers_read_the_lists():
    """They are the oracle below, so that they must read what was written by hand."""
    assert [read_sino(korean) for korean in SINO.values()] == list(SINO)
    assert [read_english(english) for english in ENGLISH.values()] == list(ENGLISH)


@given(st.integers(0, 15).flatmap(lambda power: st.integers(0, 10 ** (power + 1) - 1)))
def test_numbers_are_read_back(number):
    korean, english = spell_sino(number), spell_english(number)
    assert read_sino(korean) == read_english(english) == number
    assert "일십" not in korean and "일백" not in korean and "일천" not in korean and not korean.startswith("일만")
    assert all(word[-1] in "만억조" for word in korean.split()[:-1])


def test_native_numbers():
    assert [spell_native(number) for number in range(1, 22)] == NATIVE
    assert [spell_native(number, before_counter=True) for number in range(1, 23)] == COUNTING
    tens = ["열", "스물", "서른", "마흔", "쉰", "예순", "일흔", "여든", "아흔"]
    assert [spell_native(number) for number in range(10, 100, 10)] == tens
    assert len({spell_native(number) for number in range(1, 100)}) == 99
    assert (spell_native(99), spell_native(34, before_counter=True)) == ("아흔아홉", "서른네")


@pytest.mark.parametrize(
    "date, korean, english",
    [
        ((2024, 3, 5), "이천이십사년 삼월 오일", "March fifth, twenty twenty-four"),
        ((1999, 6, 30), "천구백구십구년 유월 삼십일", "June thirtieth, nineteen ninety-nine"),
        ((2000, 10, 31), "이천년 시월 삼십일일", "October thirty-first, two thousand"),
        ((2005, 11, 12), "이천오년 십일월 십이일", "November twelfth, two thousand five"),
        ((1900, 12, 1), "천구백년 십이월 일일", "December first, nineteen hundred"),
        ((1905, 1, 2), "천구백오년 일월 이일", "January second, nineteen oh five"),
        ((2010, 2, 23), "이천십년 이월 이십삼일", "February twenty-third, twenty ten"),
        ((2096, 2, 29), "이천구십육년 이월 이십구일", "February twenty-ninth, twenty ninety-six"),
        ((1950, 4, 8), "천구백오십년 사월 팔일", "April eighth, nineteen fifty"),
        ((1945, 8, 15), "천구백사십오년 팔월 십오일", "August fifteenth, nineteen forty-five"),
        ((1919, 5, 20), "천구백십구년 오월 이십일", "May twentieth, nineteen nineteen"),
        ((1988, 9, 17), "천구백팔십팔년 구월 십칠일", "September seventeenth, nineteen eighty-eight"),
        ((2051, 7, 9), "이천오십일년 칠월 구일", "July ninth, twenty fifty-one"),
    ],
)
def test_dates(date, korean, english):
    assert (spell_korean_date(*date), spell_english_date(*date)) == (korean, english)


def test_every_date_has_a_text_of_its_own():
    days = [datetime.date(1999, 1, 1) + datetime.timedelta(days=i) for i in range(5000)]
    for spell in (spell_korean_date, spell_english_date):
        assert len({spell(day.year, day.month, day.day) for day in days}) == len(days)
    assert len({spell_english_date(year, 1, 1) for year in range(1000, 10000)}) == 9000


@pytest.mark.parametrize(
    "time, korean, english",
    [
        ((15, 20), "오후 세 시 이십분", "three twenty p.m."),
        ((0, 0), "오전 열두 시", "twelve o'clock a.m."),
        ((12, 1), "오후 열두 시 일분", "twelve oh one p.m."),
        ((11, 59), "오전 열한 시 오십구분", "eleven fifty-nine a.m."),
        ((13, 10), "오후 한 시 십분", "one ten p.m."),
        ((6, 30), "오전 여섯 시 삼십분", "six thirty a.m."),
    ],
)
def test_times(time, korean, english):
    assert (spell_korean_time(*time), spell_english_time(*time)) == (korean, english)


def test_every_minute_has_a_text_of_its_own():
    minutes = [divmod(minute, 60) for minute in range(24 * 60)]
    for spell in (spell_korean_time, spell_english_time):
        assert len({spell(*minute) for minute in minutes}) == 24 * 60


@pytest.mark.parametrize(
    "spell, arguments, told",
    [
        (spell_sino, (-1,), "-1"),
        (spell_sino, (10**16,), "10000000000000000"),
        (spell_sino, (1.0,), "1.0"),
        (spell_sino, (True,), "True"),
        (spell_english, (10**16,), "10000000000000000"),
        (spell_native, (0,), "0"),
        (spell_native, (100,), "100"),
        (spell_korean_date, (2023, 2, 29), "29"),
        (spell_korean_date, (2023, 13, 1), "13"),
        (spell_english_date, (99, 1, 1), "99"),
        (spell_korean_time, (24, 0), "24"),
        (spell_english_time, (1, 60), "60"),
    ],
)
def test_what_is_not_spelt_is_told(spell, arguments, told):
    with pytest.raises(DataError, match=f"^{spell.__name__}.*: got {told}; expected") as caught:
        spell(*arguments)
    assert_house_style(caught.value)
