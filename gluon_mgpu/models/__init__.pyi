"""The names of this room and their modules: __init__.py imports each at its first use."""

from .resnet import Residual as Residual
from .resnet import resnet18 as resnet18
from .seq2seq.beam_search import Translation as Translation
from .seq2seq.beam_search import plot_attention as plot_attention
from .seq2seq.beam_search import translate as translate
from .seq2seq.network import Seq2Seq as Seq2Seq
from .seq2seq.sequence_loss import SequenceLoss as SequenceLoss
from .seq2seq.translation_scores import exact_match as exact_match
from .seq2seq.translator import Translator as Translator
from .seq2seq.translator import load_translator as load_translator
from .seq2seq.unigrams import unigram_log_p as unigram_log_p
