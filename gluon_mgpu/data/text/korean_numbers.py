"""Generated sentence pairs: Korean numbers, dates, times and counts with their English, in any number."""

from __future__ import annotations

import calendar
import hashlib
from functools import partial
from itertools import islice
from typing import Iterator, Sequence, Tuple

import numpy as np

from ...checks import MOST_SEED, flag, whole_number
from ...errors import DataError
from .numerals import (
    spell_english,
    spell_english_date,
    spell_english_time,
    spell_korean_date,
    spell_korean_time,
    spell_native,
    spell_sino,
)
from .pairs import SentencePairs, normalise, texts_of

# Korean noun and its counter; English singular and plural.
_COUNTED = (
    ("사과", "개", "apple", "apples"),
    ("학생", "명", "student", "students"),
    ("고양이", "마리", "cat", "cats"),
    ("책", "권", "book", "books"),
    ("자동차", "대", "car", "cars"),
    ("나무", "그루", "tree", "trees"),
    ("장미", "송이", "rose", "roses"),
    ("집", "채", "house", "houses"),
    ("종이", "장", "sheet of paper", "sheets of paper"),
    ("커피", "잔", "cup of coffee", "cups of coffee"),
    ("물", "병", "bottle of water", "bottles of water"),
    ("양말", "켤레", "pair of socks", "pairs of socks"),
)
_MAX_DIGITS = 16
_MOST_EXAMPLES = 10**6  # which take about a minute
_ZERO_SHARE = 0.25
_HELD_OUT_OF = 10  # one example in ten is held out


def korean_numbers(num_examples: int, seed: int = 0, *, held_out: bool = False, max_digits: int = 8) -> SentencePairs:
    """Return numbers, dates, times and counted things, written out in Korean, with their English.

    ```
    삼백이십오                       three hundred twenty-five
    이천이십사년 삼월 오일           March fifth, twenty twenty-four
    오후 세 시 이십분                three twenty p.m.
    고양이 스무 마리                 twenty cats
    ```

    Two in five are numbers, with uniformly distributed lengths from 1 to `max_digits` digits; the rest are the other kinds in
    equal parts. Each Korean text has exactly one English text and the other way round, so a translation is right or wrong.

    Parameters
    ----------
    num_examples : int
        Any number. Short numbers, times and counts repeat in large sets.
    seed : int
        A larger set begins with the examples of a smaller set of the same seed.
    held_out : bool
        Return test examples. They never appear without `held_out`, for any seed: see `is_held_out`.
    max_digits : int, 1 to 16

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
    for name, number, smallest, largest in (
        ("num_examples", num_examples, 0, _MOST_EXAMPLES),
        ("seed", seed, 0, MOST_SEED),
        ("max_digits", max_digits, 1, _MAX_DIGITS),
    ):
        whole_number(
            "korean_numbers", name, number, low=smallest, high=largest, advice="Pass a number in this range.", error=DataError
        )
    chosen = (pair for pair in _draw(int(seed), int(max_digits)) if is_held_out(pair[0]) == bool(held_out))
    pairs = list(islice(chosen, int(num_examples)))
    return SentencePairs([source for source, _ in pairs], [target for _, target in pairs])


def is_held_out(korean: str) -> bool:
    """Return whether `korean_numbers` uses a Korean text only for testing.

    A hash of the text decides: about one in ten is held out, but no single word and no text with 한 (one). The other texts are
    composed of these, such as numbers below 10,000 and singular nouns.

    Examples
    --------
    >>> sum(is_held_out(spell_korean_time(hour, minute)) for hour in range(24) for minute in range(60))
    136
    """
    if " " not in korean or " 한 " in korean:
        return False
    return hashlib.sha256(korean.encode()).digest()[0] * _HELD_OUT_OF < 256


def exact_match(translations: Sequence[str], references: Sequence[str]) -> float:
    """Return the share of translations that equal their reference, except for spaces and Unicode's forms.

    Raises
    ------
    DataError
        The numbers of translations and references differ, or are 0.

    Examples
    --------
    >>> exact_match(["three", "twenty five"], ["three", "twenty-five"])
    0.5
    """
    translations = texts_of("exact_match", "translations", translations)
    references = texts_of("exact_match", "references", references)
    if len(translations) != len(references) or not len(references):
        raise DataError(
            f"exact_match: got {len(translations)} translations and {len(references)} references; expected as many of each, 1 or "
            "more. Translate every sentence."
        )
    return sum(normalise(one) == normalise(other) for one, other in zip(translations, references)) / len(references)


def _draw(seed: int, max_digits: int) -> Iterator[Tuple[str, str]]:
    """Yield pairs without end."""
    rng = np.random.default_rng([seed, max_digits])
    number = partial(_number, max_digits=max_digits)
    kinds = (number, number, _date, _time, _count)
    while True:
        yield kinds[rng.integers(len(kinds))](rng)


def _number(rng: np.random.Generator, max_digits: int) -> Tuple[str, str]:
    """Return a number of 1 to `max_digits` digits; a quarter of them are set to 0, which is not spoken."""
    num_digits = int(rng.integers(1, max_digits + 1))
    digits = rng.integers(0, 10, num_digits) * (rng.random(num_digits) >= _ZERO_SHARE)
    digits[0] = rng.integers(min(1, num_digits - 1), 10)
    number = int("".join(map(str, digits)))
    return spell_sino(number), spell_english(number)


def _date(rng: np.random.Generator) -> Tuple[str, str]:
    year, month = int(rng.integers(1900, 2100)), int(rng.integers(1, 13))
    day = int(rng.integers(1, calendar.monthrange(year, month)[1] + 1))
    return spell_korean_date(year, month, day), spell_english_date(year, month, day)


def _time(rng: np.random.Generator) -> Tuple[str, str]:
    hour, minute = int(rng.integers(24)), int(rng.integers(60))
    return spell_korean_time(hour, minute), spell_english_time(hour, minute)


def _count(rng: np.random.Generator) -> Tuple[str, str]:
    noun, counter, one, several = _COUNTED[rng.integers(len(_COUNTED))]
    number = int(rng.integers(1, 100))
    korean = f"{noun} {spell_native(number, before_counter=True)} {counter}"
    return korean, f"{spell_english(number)} {one if number == 1 else several}"
