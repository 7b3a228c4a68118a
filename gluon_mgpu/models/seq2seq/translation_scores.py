"""Scores of translations: exact match, BLEU and chrF."""

from __future__ import annotations

import unicodedata
from importlib.util import find_spec
from typing import Any, Dict, Sequence

from ...checks import texts_of
from ...data.text.pairs import normalise
from ...errors import DataError
from ...runtime.environment import require


def has_sacrebleu() -> bool:
    """Return whether sacrebleu is installed, which BLEU and chrF need: the extra `seq2seq`. Raise if it cannot be imported."""
    return find_spec("sacrebleu") is not None and bool(_import())


def translation_scores(translations: Sequence[str], references: Sequence[str]) -> Dict[str, float]:
    """Return the scores of translations: `exact_match`, and with sacrebleu also `bleu` and `chrf`; all from 0 to 100.

    BLEU compares sacrebleu's default words (13a), or characters if the references are Korean, whose words have many endings.
    Compare scores of characters only with each other.

    Parameters
    ----------
    translations, references : sequence of str, of one length

    Raises
    ------
    DataError
        The numbers of translations and references differ, or there are none.

    Examples
    --------
    >>> translation_scores(["three", "twenty five"], ["three", "twenty-five"])["exact_match"]
    50.0

    Source: Papineni et al., "BLEU", 2002; Popović, "chrF", 2015; Post, "A call for clarity in reporting BLEU scores", 2018.
    """
    scores = {"exact_match": 100 * exact_match(translations, references)}
    for name, metric in _metrics(references).items():
        scores[name] = float(metric.corpus_score(list(translations), [list(references)]).score)
    return scores


def score_signatures(references: Sequence[str]) -> Dict[str, str]:
    """Return sacrebleu's signatures of `bleu` and `chrf`, which say how they were computed; none without sacrebleu."""
    found = {}
    for name, metric in _metrics(references).items():
        metric.corpus_score(list(references), [list(references)])  # it counts the references
        found[name] = str(metric.get_signature())
    return found


def _import() -> Any:
    return require("sacrebleu.metrics", "seq2seq", "translation_scores")  # only here: the import is slow


def _metrics(references: Sequence[str]) -> Dict[str, Any]:
    if not has_sacrebleu():
        return {}
    metrics = _import()
    tokenize = "char" if _is_korean(references) else "13a"
    # force: sentences of few words that end in a period are not tokenized text, of which sacrebleu would warn
    return {"bleu": metrics.BLEU(tokenize=tokenize, force=True), "chrf": metrics.CHRF()}


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
    translations = texts_of("exact_match", "translations", translations, error=DataError)
    references = texts_of("exact_match", "references", references, error=DataError)
    if len(translations) != len(references) or not len(references):
        raise DataError(
            f"exact_match: got {len(translations)} translations and {len(references)} references; expected the same number, 1 or "
            "more. Translate every sentence."
        )
    return sum(normalise(one) == normalise(other) for one, other in zip(translations, references)) / len(references)


def _is_korean(texts: Sequence[str]) -> bool:
    """Return whether most letters are Hangul."""
    letters = [letter for text in texts for letter in unicodedata.normalize("NFC", text) if letter.isalpha()]
    return 2 * sum("\uac00" <= letter <= "\ud7a3" for letter in letters) > len(letters)
