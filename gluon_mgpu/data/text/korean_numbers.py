"""Generated sentence pairs: Korean numbers, times and counted things with their English, in any number."""

from __future__ import annotations

import hashlib
from typing import List, Tuple

import numpy as np

from ...checks import MOST_SEED, flag, whole_number
from ...errors import DataError
from .pairs import SentencePairs

_DIGITS = ("", *"일이삼사오육칠팔구")
_POWERS = ("", "십", "백", "천")  # inside a group of four digits
_GROUPS = ("", "만", "억")  # 10**4, 10**8
_NATIVE = ("", "한", "두", "세", "네", "다섯", "여섯", "일곱", "여덟", "아홉")  # before a noun that counts
_NATIVE_TENS = ("", "열", "스물", "서른", "마흔", "쉰", "예순", "일흔", "여든", "아흔")
# fmt: off
_BELOW_TWENTY = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine",
    "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
# fmt: on
_TENS = ("", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_THOUSANDS = ("", "thousand", "million", "billion")
# Korean noun and its counter; English singular. The plural has an s.
_COUNTED = (
    ("사과", "개", "apple"),
    ("학생", "명", "student"),
    ("고양이", "마리", "cat"),
    ("책", "권", "book"),
    ("자동차", "대", "car"),
    ("나무", "그루", "tree"),
)
_MOST_EXAMPLES = 10**6  # which take about a minute
_MOST_DIGITS = 8


def korean_numbers(num_examples: int, seed: int = 0, *, held_out: bool = False) -> SentencePairs:
    """Return numbers, times and counted things, written out in Korean, with their English.

    ```
    삼백이십오                       three hundred twenty-five
    오후 세 시 이십분                three twenty p.m.
    고양이 스무 마리                 twenty cats
    ```

    Half are numbers, with uniformly distributed lengths from 1 to 8 digits; the rest are the other kinds in equal parts. Each
    Korean text has exactly one English text and the other way round, so a translation is right or wrong.

    Parameters
    ----------
    num_examples : int
        Any number. Short numbers, times and counts repeat in large sets.
    seed : int
        A larger set begins with the examples of a smaller set of the same seed.
    held_out : bool
        Return test examples. They never appear without `held_out`, for any seed.

    Raises
    ------
    DataError
        An argument is out of its range.

    Examples
    --------
    >>> train, test = korean_numbers(5000), korean_numbers(500, held_out=True)
    >>> len(train), len(test), set(train.source) & set(test.source)
    (5000, 500, set())
    """
    flag("korean_numbers", "held_out", held_out, error=DataError)
    for name, number, largest in (("num_examples", num_examples, _MOST_EXAMPLES), ("seed", seed, MOST_SEED)):
        whole_number("korean_numbers", name, number, low=0, high=largest, advice="Pass a number in this range.", error=DataError)
    rng = np.random.default_rng(seed)
    kinds = (_number, _number, _time, _count)
    pairs: List[Tuple[str, str]] = []
    while len(pairs) < num_examples:
        pair = kinds[rng.integers(len(kinds))](rng)
        pairs += [pair] if is_held_out(pair[0]) == bool(held_out) else []
    return SentencePairs([source for source, _ in pairs], [target for _, target in pairs])


def is_held_out(korean: str) -> bool:
    """Return whether a Korean text is only for testing: about one in ten by its hash, but no single word, and none with 한 (one).

    The other texts are composed of these, such as numbers below 10,000 and singular nouns.
    """
    if " " not in korean or " 한 " in korean:
        return False
    return hashlib.sha256(korean.encode()).digest()[0] < 26


def _number(rng: np.random.Generator) -> Tuple[str, str]:
    """Return a number of 1 to 8 digits; a quarter of them are set to 0, which is not spoken."""
    num_digits = int(rng.integers(1, _MOST_DIGITS + 1))
    digits = rng.integers(0, 10, num_digits) * (rng.random(num_digits) >= 0.25)
    digits[0] = rng.integers(min(1, num_digits - 1), 10)
    number = int("".join(map(str, digits)))
    return spell_sino(number), spell_english(number)


def _time(rng: np.random.Generator) -> Tuple[str, str]:
    hour, minute = int(rng.integers(24)), int(rng.integers(60))
    korean = f"{'오전' if hour < 12 else '오후'} {spell_native(hour % 12 or 12)} 시"
    minutes = f"{'oh ' if minute < 10 else ''}{spell_english(minute)}" if minute else "o'clock"
    english = f"{spell_english(hour % 12 or 12)} {minutes} {'a.m.' if hour < 12 else 'p.m.'}"
    return f"{korean} {spell_sino(minute)}분" if minute else korean, english


def _count(rng: np.random.Generator) -> Tuple[str, str]:
    noun, counter, one = _COUNTED[rng.integers(len(_COUNTED))]
    number = int(rng.integers(1, 100))
    return f"{noun} {spell_native(number)} {counter}", f"{spell_english(number)} {one}{'s' * (number > 1)}"


def spell_sino(number: int) -> str:
    """Return a number below 10**12 in Sino-Korean numerals, with a space after 만 and 억.

    One is not spoken before 십, 백 and 천, nor before a 만 that begins the number.

    Examples
    --------
    >>> spell_sino(325), spell_sino(12345), spell_sino(120010000)
    ('삼백이십오', '만 이천삼백사십오', '일억 이천일만')

    Source: the spaces are those of Hangeul Orthography (한글 맞춤법), article 44.
    """
    words: List[str] = []
    for power in range(len(_GROUPS) - 1, -1, -1):
        group = number // 10000**power % 10000
        is_bare = power == 1 and group == 1 and not words  # 만, but 일억 일만
        if group:
            words.append(("" if is_bare else _sino_group(group)) + _GROUPS[power])
    return " ".join(words) or "영"


def _sino_group(group: int) -> str:
    """Return 1 to 9999: a digit before each power, except for a one, which is spoken only in the last place."""
    digits = [(group // 10**power % 10, power) for power in (3, 2, 1, 0)]
    return "".join(("" if digit == 1 and power else _DIGITS[digit]) + _POWERS[power] for digit, power in digits if digit)


def spell_native(number: int) -> str:
    """Return 1 to 99 in native Korean numerals, as before a noun that counts.

    Examples
    --------
    >>> spell_native(21), spell_native(20)
    ('스물한', '스무')
    """
    return "스무" if number == 20 else _NATIVE_TENS[number // 10] + _NATIVE[number % 10]


def spell_english(number: int) -> str:
    """Return a number below 10**12 in American English.

    Examples
    --------
    >>> spell_english(325), spell_english(12045)
    ('three hundred twenty-five', 'twelve thousand forty-five')
    """
    words: List[str] = []
    for power in range(len(_THOUSANDS) - 1, -1, -1):
        hundreds, rest = divmod(number // 1000**power % 1000, 100)
        words += [_BELOW_TWENTY[hundreds], "hundred"] if hundreds else []
        if rest >= 20:
            words.append(_TENS[rest // 10] + (f"-{_BELOW_TWENTY[rest % 10]}" if rest % 10 else ""))
        elif rest:
            words.append(_BELOW_TWENTY[rest])
        words += [_THOUSANDS[power]] if hundreds + rest and power else []
    return " ".join(words) or "zero"
