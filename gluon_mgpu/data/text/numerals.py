"""Numbers, dates and times spelt out in Korean and in English."""

from __future__ import annotations

import calendar
from typing import Any, List

from ...checks import is_whole, short
from ...errors import DataError

LARGEST = 10**16 - 1  # 구천구백구십구조 ..., the last number below 경

_DIGITS = ("", "일", "이", "삼", "사", "오", "육", "칠", "팔", "구")
_POWERS = ("", "십", "백", "천")  # inside a group of four digits
_GROUPS = ("", "만", "억", "조")  # 10**4, 10**8, 10**12
_NATIVE = ("", "하나", "둘", "셋", "넷", "다섯", "여섯", "일곱", "여덟", "아홉")
_NATIVE_SHORT = ("", "한", "두", "세", "네", *_NATIVE[5:])
_NATIVE_TENS = ("", "열", "스물", "서른", "마흔", "쉰", "예순", "일흔", "여든", "아흔")
_IRREGULAR_MONTHS = {6: "유월", 10: "시월"}

# fmt: off
_BELOW_TWENTY = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine",
    "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
_TENS = ("", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_THOUSANDS = ("", "thousand", "million", "billion", "trillion", "quadrillion")
_IRREGULAR_ORDINALS = {
    "one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth", "twelve": "twelfth",
}
_MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)
# fmt: on


def spell_sino(number: int) -> str:
    """Return a number in Sino-Korean numerals, with a space after 만, 억 and 조.

    One is not spoken before 십, 백 and 천, nor before a 만 that begins the number.

    Parameters
    ----------
    number : int, 0 to 9999999999999999

    Raises
    ------
    DataError
        Another number.

    Examples
    --------
    >>> spell_sino(325), spell_sino(12345), spell_sino(120010000)
    ('삼백이십오', '만 이천삼백사십오', '일억 이천일만')

    Source: the spaces are those of Hangeul Orthography (한글 맞춤법), article 44.
    """
    _check("spell_sino", number, 0, LARGEST)
    if number == 0:
        return "영"
    words: List[str] = []
    for power in range(len(_GROUPS) - 1, -1, -1):
        group = number // 10000**power % 10000
        is_bare = power == 1 and group == 1 and not words  # 만, but 일억 일만
        if group:
            words.append(("" if is_bare else _sino_group(group)) + _GROUPS[power])
    return " ".join(words)


def spell_native(number: int, *, before_counter: bool = False) -> str:
    """Return a number in native Korean numerals.

    Parameters
    ----------
    number : int, 1 to 99
    before_counter : bool
        The short forms that stand before a noun that counts: 한, 두, 세, 네, 스무.

    Raises
    ------
    DataError
        Another number: there, Korean uses Sino-Korean numerals.

    Examples
    --------
    >>> spell_native(21), spell_native(21, before_counter=True), spell_native(20, before_counter=True)
    ('스물하나', '스물한', '스무')
    """
    _check("spell_native", number, 1, 99)
    if before_counter and number == 20:
        return "스무"
    tens, ones = divmod(number, 10)
    return _NATIVE_TENS[tens] + (_NATIVE_SHORT if before_counter else _NATIVE)[ones]


def spell_english(number: int) -> str:
    """Return a number in American English.

    Parameters
    ----------
    number : int, 0 to 9999999999999999

    Raises
    ------
    DataError
        Another number.

    Examples
    --------
    >>> spell_english(325), spell_english(12045)
    ('three hundred twenty-five', 'twelve thousand forty-five')
    """
    _check("spell_english", number, 0, LARGEST)
    if number == 0:
        return "zero"
    words: List[str] = []
    for power in range(len(_THOUSANDS) - 1, -1, -1):
        group = number // 1000**power % 1000
        if group:
            words += [*_english_group(group), _THOUSANDS[power]]
    return " ".join(word for word in words if word)


def spell_korean_date(year: int, month: int, day: int) -> str:
    """Return a date in Korean: Sino-Korean numerals, and the irregular months 유월 and 시월.

    Examples
    --------
    >>> spell_korean_date(2024, 6, 5)
    '이천이십사년 유월 오일'
    """
    _check_date("spell_korean_date", year, month, day)
    return f"{spell_sino(year)}년 {_IRREGULAR_MONTHS.get(month) or spell_sino(month) + '월'} {spell_sino(day)}일"


def spell_english_date(year: int, month: int, day: int) -> str:
    """Return a date in English.

    Examples
    --------
    >>> spell_english_date(2024, 6, 5), spell_english_date(1905, 10, 12)
    ('June fifth, twenty twenty-four', 'October twelfth, nineteen oh five')
    """
    _check_date("spell_english_date", year, month, day)
    return f"{_MONTHS[month - 1]} {_english_ordinal(day)}, {_english_year(year)}"


def spell_korean_time(hour: int, minute: int) -> str:
    """Return a time of the day in Korean: the hour in native numerals, the minute in Sino-Korean ones.

    Parameters
    ----------
    hour : int, 0 to 23
    minute : int, 0 to 59

    Examples
    --------
    >>> spell_korean_time(15, 20), spell_korean_time(0, 0)
    ('오후 세 시 이십분', '오전 열두 시')
    """
    _check_time("spell_korean_time", hour, minute)
    half = "오전" if hour < 12 else "오후"
    spelt = f"{half} {spell_native(hour % 12 or 12, before_counter=True)} 시"
    return f"{spelt} {spell_sino(minute)}분" if minute else spelt


def spell_english_time(hour: int, minute: int) -> str:
    """Return a time of the day in English.

    Parameters
    ----------
    hour : int, 0 to 23
    minute : int, 0 to 59

    Examples
    --------
    >>> spell_english_time(15, 20), spell_english_time(0, 5), spell_english_time(12, 0)
    ('three twenty p.m.', 'twelve oh five a.m.', "twelve o'clock p.m.")
    """
    _check_time("spell_english_time", hour, minute)
    minutes = f"{'oh ' if minute < 10 else ''}{spell_english(minute)}" if minute else "o'clock"
    return f"{spell_english(hour % 12 or 12)} {minutes} {'a.m.' if hour < 12 else 'p.m.'}"


def _sino_group(group: int) -> str:
    """Return 1 to 9999: a digit before each power, except for a one, which is spoken only in the last place."""
    digits = [group // 10**power % 10 for power in range(4)]
    return "".join(
        ("" if digit == 1 and power else _DIGITS[digit]) + _POWERS[power]
        for power, digit in reversed(list(enumerate(digits)))
        if digit
    )


def _english_group(group: int) -> List[str]:
    hundreds, rest = divmod(group, 100)
    words = [_BELOW_TWENTY[hundreds], "hundred"] if hundreds else []
    if rest >= 20:
        words.append(_TENS[rest // 10] + (f"-{_BELOW_TWENTY[rest % 10]}" if rest % 10 else ""))
    elif rest:
        words.append(_BELOW_TWENTY[rest])
    return words


def _english_ordinal(number: int) -> str:
    """Return first to ninety-ninth."""
    before, hyphen, last = spell_english(number).rpartition("-")
    last = _IRREGULAR_ORDINALS.get(last) or (last[:-1] + "ieth" if last.endswith("y") else last + "th")
    return before + hyphen + last


def _english_year(year: int) -> str:
    century, rest = divmod(year, 100)
    if century % 10 == 0 and rest < 10:
        return spell_english(year)  # two thousand, two thousand five
    if rest < 10:
        return f"{spell_english(century)} {f'oh {spell_english(rest)}' if rest else 'hundred'}"
    return f"{spell_english(century)} {spell_english(rest)}"


def _check(operation: str, number: Any, smallest: int, largest: int) -> None:
    if not is_whole(number) or not smallest <= number <= largest:
        raise DataError(
            f"{operation}: got {short(number)}; expected a whole number from {smallest} to {largest}. Others are not spelt here."
        )


def _check_date(operation: str, year: int, month: int, day: int) -> None:
    _check(f"{operation} year", year, 1000, 9999)
    _check(f"{operation} month", month, 1, 12)
    _check(f"{operation} day", day, 1, calendar.monthrange(year, month)[1])


def _check_time(operation: str, hour: int, minute: int) -> None:
    _check(f"{operation} hour", hour, 0, 23)
    _check(f"{operation} minute", minute, 0, 59)
