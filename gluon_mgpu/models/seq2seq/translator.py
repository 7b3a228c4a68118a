"""A translator: a seq2seq network and the vocabularies that it was trained with, in one folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Union

import mxnet as mx
import numpy as np
from mxnet import Context

from ...checkpoint.manifest import MANIFEST, Files
from ...checkpoint.replace_folder import explained, new_folder, read_files
from ...checkpoint.rotation import INNER
from ...checkpoint.save_and_load import check_folder, check_parameters, set_parameters
from ...checkpoint.snapshot import Snapshot, content_of, sizes_of, take_snapshot
from ...checks import MOST, instance, path_of, texts_of
from ...data import EOS, Vocabulary
from ...data.text.vocabulary import fingerprint
from ...devices.select import check_contexts
from ...distributed.process import this_process
from ...errors import DataError, StateError, TrainerError
from ...mxnet_internals.parameters import set_values, structural_params
from ...runtime.new_files import new_file, sync
from ...runtime.untrusted_files import MOST_JSON, values_of
from ...trainer.trainer import Trainer
from .. import Seq2Seq
from .beam_search import Translation, translate

PathLike = Union[str, Path]

CONFIG_FILE = "model.json"
BEAM_SIZE = 5  # of translations, if no score of a validation has chosen another
SIDES = ("source", "target")
_ADVICE = "Use another folder"
_OWN_FILES = (CONFIG_FILE, *(f"{side}.vocab" for side in SIDES))
PARTS = (*_OWN_FILES, INNER)  # of the folder of a translator
_FORM = {"network": dict, "beam_size?": range(1, MOST), "length_ratio?": float, "*": object}  # of model.json


@dataclass(frozen=True)
class TranslatedText:
    """One translation of a text.

    Attributes
    ----------
    text : str
    score : float
        The rank of translations of one text; 0 for the empty translation of an empty text.
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
        Options of `Seq2Seq`, except the sizes of the vocabularies.

    Attributes
    ----------
    net : Seq2Seq
        To be initialised and trained.
    source_vocabulary, target_vocabulary : Vocabulary
    options : dict
    beam_size : int or None
        The beam of the best validation score, if `train seq2seq` has compared them: `gluon-mgpu translate` uses it.
    length_ratio : float or None
        `length_ratio` of `translate` where the search has none, if it improved the validation score.

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
        for name, one in (("source_vocabulary", source_vocabulary), ("target_vocabulary", target_vocabulary)):
            instance("Translator", name, one, Vocabulary, "a Vocabulary", advice="Pass what build_vocabulary returns.")
        self.source_vocabulary, self.target_vocabulary, self.options = source_vocabulary, target_vocabulary, options
        self.beam_size: Optional[int] = None
        self.length_ratio: Optional[float] = None
        try:
            self.net = Seq2Seq(len(source_vocabulary), len(target_vocabulary), **options)
        except TypeError as error:
            raise TrainerError(
                f"Translator: got the options {', '.join(options)}; expected those of models.Seq2Seq ({error}). Leave out "
                "the others."
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
            Others of `translate`: `alpha`, `length_ratio`, `max_length`, `max_repeats`, `batch_size`, `attention`.

        Raises
        ------
        TrainerError
            `texts` is not a list of strings, or an option is invalid.
        """
        texts = texts_of("Translator", "texts", texts)
        encoded = [self.source_vocabulary.encode(text) for text in texts]
        not_empty = [sentence for sentence in encoded if sentence]
        search.setdefault("length_ratio", self.length_ratio)
        found = iter(translate(self.net, not_empty, beam_size=beam_size, num_best=num_best, **search))
        return [
            [self._as_text(sentence, one) for one in next(found)] if sentence else [TranslatedText("", 0.0, [], [])]
            for sentence in encoded
        ]

    def best(self, texts: Sequence[str], **search: Any) -> List[str]:
        """Return the best translation of each text."""
        return [found[0].text for found in self.translate(texts, **search)]

    def on_device(self, ctx: Context) -> Translator:
        """Return a translator with copies of the weights on one device: to translate with a network that spans devices."""
        made = Translator(self.source_vocabulary, self.target_vocabulary, **self.options)
        values = structural_params(self.net)
        for name, param in structural_params(made.net).items():
            set_values(param, values[name].list_data()[0].as_in_context(ctx), ctx)
        return made

    def save(self, folder: PathLike, trainer: Optional[Trainer] = None, *, progress: Optional[Dict[str, Any]] = None) -> None:
        """Write a folder that `load_translator` reads.

        ```
        model.json                    the network's options, and a description of its vocabularies
        source.vocab, target.vocab
        checkpoint/                   from save_checkpoint: weights, and the trainer's states if there is one
        ```

        The folder is written next to the target, synced to the disk and then renamed, so the target is always complete. In a job
        of several processes, all must call it, and the first one writes.

        Parameters
        ----------
        folder : str or pathlib.Path
            An existing translator is replaced. It is an error if the folder holds anything else.
        trainer : Trainer, optional
        progress : dict, optional
            See `save_checkpoint`.

        Raises
        ------
        StateError
            The folder holds something else, or the network has no values. Nothing was written.
        SaveError
            The folder cannot be written. The previous content stays.
        """
        folder = Path(folder)
        check_folder(folder, PARTS, "Translator.save", "translator")
        snapshot = take_snapshot(self.net, trainer, progress)
        if this_process().rank:
            return
        with explained("Translator.save", folder, left="The translator before stays."), new_folder(folder) as new:
            self.write(new, snapshot)

    def write(self, folder: Path, snapshot: Snapshot) -> None:
        """Fill an existing empty folder with the network of a snapshot; the checkpoint comes last.

        It may run in any thread.
        """
        self.source_vocabulary.save(folder / "source.vocab")
        self.target_vocabulary.save(folder / "target.vocab")
        (folder / CONFIG_FILE).write_text(json.dumps(self.config(), indent=1), encoding="utf-8")
        for path in folder.iterdir():
            sync(path)
        (folder / INNER).mkdir()
        sync(folder)  # what the checkpoint's manifest comes after
        snapshot.write(folder / INNER)

    def config(self) -> Dict[str, Any]:
        """Return the content of model.json."""
        known = {"source_vocabulary": self.source_vocabulary.config(), "target_vocabulary": self.target_vocabulary.config()}
        search = {"beam_size": self.beam_size, "length_ratio": self.length_ratio}
        return {"network": self.options, **known, **{name: value for name, value in search.items() if value is not None}}

    def save_config(self, folder: PathLike) -> None:
        """Write model.json again, to a folder that `save` wrote."""
        path = Path(folder) / CONFIG_FILE
        with explained("Translator.save_config", path, left="The file before stays."), new_file(path, follow=False) as new:
            new.write_text(json.dumps(self.config(), indent=1), encoding="utf-8")

    def _as_text(self, sentence: List[int], found: Translation) -> TranslatedText:
        source = self.source_vocabulary.tokens([*sentence, EOS])
        target = self.target_vocabulary.tokens([*found.tokens, *([EOS] if found.finished else [])])
        return TranslatedText(self.target_vocabulary.decode(found.tokens), found.score, source, target, found.attention)


def load_translator(folder: PathLike, ctx: Union[None, Context, Sequence[Context]] = None) -> Translator:
    """Return the translator that `Translator.save` wrote, on any number of devices.

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
        sentencepiece is not installed.
    """
    folder = path_of("load_translator", "folder", folder, error=StateError)
    if ctx is not None:
        check_contexts(list(ctx) if isinstance(ctx, (list, tuple)) else [ctx], "load_translator")
    inner = {f"{INNER}/{name}": most for name, most in sizes_of(folder / INNER).items()}
    files = read_files(folder, {**dict.fromkeys(_OWN_FILES, MOST_JSON), **inner}, "load_translator")
    missing = [name for name in _OWN_FILES if name not in files.contents]
    missing += [INNER] if f"{INNER}/{MANIFEST}" not in files.contents else []
    if missing:
        raise StateError(
            f"load_translator: got {files.folder} without {', '.join(missing)}; expected a folder of Translator.save. "
            "Pass, for example, the folder best of a training run."
        )
    content = content_of(files.inner(INNER), with_training=False)
    try:
        config = values_of(files.contents[CONFIG_FILE], _FORM, CONFIG_FILE)
        options, known = config["network"], [config[f"{side}_vocabulary"] for side in SIDES]
        num_layers = int(options.get("num_layers", 1))
        if num_layers > len(content.params):  # so many are made before they are compared
            raise ValueError(f"{num_layers} layers of {len(content.params)} arrays")
        vocabularies = [_read_vocabulary(files, side, one["fingerprint"]) for side, one in zip(SIDES, known)]
        translator = Translator(*vocabularies, **options)
        translator.beam_size, translator.length_ratio = config.get("beam_size"), config.get("length_ratio")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise StateError(
            f"load_translator: got {files.folder / CONFIG_FILE}, which is damaged ({type(error).__name__}: {error}); expected "
            f"it as Translator.save wrote it. {_ADVICE}."
        ) from error
    check_parameters(content, translator.net)  # before memory is taken for it
    translator.net.initialize(ctx=list(ctx) if isinstance(ctx, (list, tuple)) else ctx or mx.current_context())
    set_parameters(content, translator.net)
    return translator


def _read_vocabulary(files: Files, side: str, known: str) -> Vocabulary:
    name = f"{side}.vocab"
    if known != fingerprint(files.contents[name]):  # before a reader in C++ gets it
        raise DataError(
            f"load_translator: got {files.folder / name}, whose bytes are not those that {CONFIG_FILE} knows; expected the "
            f"vocabulary that was saved with it. {_ADVICE}."
        )
    return Vocabulary(files.contents[name])
