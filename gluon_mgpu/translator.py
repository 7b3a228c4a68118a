"""A translator: a seq2seq network and the vocabularies that it was trained with, in one folder."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet import Context

from .checkpoint import load_checkpoint, save_checkpoint
from .data import EOS, Vocabulary, check_vocabulary, load_vocabulary
from .errors import StateError, TrainerError
from .models import Seq2Seq
from .trainer import Trainer
from .translation import Translation, translate

PathLike = Union[str, Path]

_CONFIG, _CHECKPOINT = "model.json", "checkpoint"
_SIDES = ("source", "target")
_FILES = (_CONFIG, _CHECKPOINT, *(f"{side}.vocab" for side in _SIDES))


@dataclass(frozen=True)
class TranslatedText:
    """One translation of a text.

    Attributes
    ----------
    text : str
    score : float
        What translations of one text are ranked by; 0 for the translation of no text, which is no text.
    source_tokens, target_tokens : list of str
        With the ends of the sentences, as `attention` counts them.
    attention : numpy.ndarray, shape (target tokens, source tokens), or None
    """

    text: str
    score: float
    source_tokens: List[str]
    target_tokens: List[str]
    attention: Optional[np.ndarray] = None


class Translator:
    """Text in, text out: a network between two vocabularies.

    ```
    text ─► source vocabulary ─► numbers ─► network, on its devices ─► numbers ─► target vocabulary ─► text
    ```

    Parameters
    ----------
    source_vocabulary, target_vocabulary : Vocabulary
    **options
        Of `Seq2Seq`, but for the vocabularies' sizes.

    Attributes
    ----------
    net : Seq2Seq
        To be initialised and trained.
    source_vocabulary, target_vocabulary : Vocabulary
    options : dict

    Raises
    ------
    TrainerError
        An option is none of `Seq2Seq`'s.

    Examples
    --------
    >>> import gluon_mgpu as mgpu
    >>> texts = ["하나 둘"], ["one two"]
    >>> translator = Translator(*(mgpu.data.build_vocabulary(side, "words") for side in texts), embed_size=4, hidden_size=8)
    >>> translator.net.initialize(ctx=mx.cpu(0))
    >>> len(translator.translate(["하나", "", "둘 하나"], beam_size=2))
    3
    """

    def __init__(self, source_vocabulary: Vocabulary, target_vocabulary: Vocabulary, **options: Any) -> None:
        self.source_vocabulary, self.target_vocabulary, self.options = source_vocabulary, target_vocabulary, options
        try:
            self.net = Seq2Seq(len(source_vocabulary), len(target_vocabulary), **options)
        except TypeError as error:
            raise TrainerError(
                f"Translator: got the options {', '.join(options)}; need those of models.Seq2Seq ({error}). Leave out the others."
            ) from error

    def translate(
        self, texts: Sequence[str], *, beam_size: int = 1, num_best: int = 1, **search: Any
    ) -> List[List[TranslatedText]]:
        """Return the best translations of each text, best first, in the order of the texts.

        Parameters
        ----------
        texts : sequence of str
            A text of nothing but spaces becomes one empty text.
        beam_size, num_best : int
        **search
            Others of `translate`: `alpha`, `penalty`, `max_length`, `batch_size`, `attention`.

        Raises
        ------
        TrainerError
            Not a list of texts, or a wrong option.
        """
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise TrainerError(f"Translator: got {texts!r:.60}; need a list of texts. Pass [text] for one.")
        encoded = [self.source_vocabulary.encode(text) for text in texts]
        asked = [sentence for sentence in encoded if sentence]
        found = iter(translate(self.net, asked, beam_size=beam_size, num_best=num_best, **search))
        return [
            [self._told(sentence, one) for one in next(found)] if sentence else [TranslatedText("", 0.0, [], [])]
            for sentence in encoded
        ]

    def best(self, texts: Sequence[str], **search: Any) -> List[str]:
        """Return the best translation of each text."""
        return [found[0].text for found in self.translate(texts, **search)]

    def save(self, folder: PathLike, trainer: Optional[Trainer] = None, progress: Optional[Dict[str, Any]] = None) -> None:
        """Write a folder that `load_translator` reads.

        ```
        model.json                    the network's options, and what its vocabularies are known by
        source.vocab, target.vocab
        checkpoint/                   of save_checkpoint: weights, and the trainer's states where there is one
        ```

        The folder is written beside and then renamed: one of this name is whole.

        Parameters
        ----------
        folder : str or pathlib.Path
            Replaced if it is there, and refused if it holds anything else.
        trainer : Trainer, optional
        progress : dict, optional
            See `save_checkpoint`.

        Raises
        ------
        StateError
            The folder holds something else, or the network has no values. Nothing was written.
        """
        folder = Path(folder)
        check_replaceable(folder)
        new, old = (folder.with_name(f".{folder.name}.{what}") for what in ("new", "old"))
        shutil.rmtree(new, ignore_errors=True)
        try:
            save_checkpoint(new / _CHECKPOINT, self.net, trainer, progress)
            for side, vocabulary in zip(_SIDES, self._vocabularies()):
                vocabulary.save(new / f"{side}.vocab")
            (new / _CONFIG).write_text(json.dumps(self.config(), indent=1), encoding="utf-8")
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)

    def config(self) -> Dict[str, Any]:
        """Return what `save` keeps in model.json."""
        known = {f"{side}_vocabulary": one.config() for side, one in zip(_SIDES, self._vocabularies())}
        return {"network": self.options, **known}

    def _vocabularies(self) -> Tuple[Vocabulary, Vocabulary]:
        return self.source_vocabulary, self.target_vocabulary

    def _told(self, sentence: List[int], found: Translation) -> TranslatedText:
        source = self.source_vocabulary.tokens([*sentence, EOS])
        target = self.target_vocabulary.tokens([*found.tokens, *([EOS] if found.finished else [])])
        return TranslatedText(self.target_vocabulary.decode(found.tokens), found.score, source, target, found.attention)


def load_translator(folder: PathLike, ctx: Union[None, Context, Sequence[Context]] = None) -> Translator:
    """Return what `Translator.save` wrote, on these devices: as many as then or not.

    Parameters
    ----------
    folder : str or pathlib.Path
    ctx : mxnet.Context or list of them, optional
        The current one by default.

    Raises
    ------
    StateError
        The folder holds no translator, or a damaged one.
    DataError
        A vocabulary is not the one that the network was trained with.
    MissingExtraError
        It has subwords, and sentencepiece is not installed.
    """
    folder = Path(folder)
    missing = [name for name in _FILES if not (folder / name).exists()]
    if missing:
        raise StateError(
            f"load_translator: got {folder} without {', '.join(missing)}; need a folder of Translator.save. Pass the folder best "
            "of a training run, say."
        )
    options, known = _read_config(folder / _CONFIG)
    vocabularies = []
    for side in _SIDES:
        path = folder / f"{side}.vocab"
        vocabularies.append(load_vocabulary(path))
        check_vocabulary(vocabularies[-1], known[side], str(path))
    translator = Translator(*vocabularies, **options)
    translator.net.initialize(ctx=list(ctx) if isinstance(ctx, (list, tuple)) else ctx or mx.current_context())
    load_checkpoint(folder / _CHECKPOINT, translator.net)
    return translator


def _read_config(path: Path) -> Tuple[Dict[str, Any], Dict[str, Mapping[str, Any]]]:
    """Return the options of the network, and what each side's vocabulary is known by."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return dict(config["network"]), {side: dict(config[f"{side}_vocabulary"]) for side in _SIDES}
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"load_translator: got {path}, which is damaged ({type(error).__name__}: {error}); need a file of Translator.save. "
            "Use another folder."
        ) from error


def check_replaceable(folder: Path) -> None:
    """Raise `StateError` unless `Translator.save` may write this folder: it is not there yet, or a translator is in it."""
    others = [path.name for path in folder.iterdir() if path.name not in _FILES] if folder.is_dir() else []
    if others or not folder.name or (folder.exists() and not folder.is_dir()):
        raise StateError(
            f"Translator.save: got {folder}, which holds {', '.join(sorted(others)[:3]) or 'no translator'}; need a folder of "
            f"its own, which is replaced as a whole. Pass {folder / 'translator'}, say."
        )
