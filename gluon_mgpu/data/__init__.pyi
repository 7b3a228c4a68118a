"""The names of this room and their modules: __init__.py imports each at its first use."""

from .array_loader import ArrayLoader as ArrayLoader
from .idx import load_idx_folder as load_idx_folder
from .images import ImageData as ImageData
from .images import load_digits as load_digits
from .images import load_fashion_mnist as load_fashion_mnist
from .images import load_mnist as load_mnist
from .joined_batches import JoinedBatches as JoinedBatches
from .sharded_sampler import ShardedSampler as ShardedSampler
from .text.korean_numbers import korean_numbers as korean_numbers
from .text.pair_loader import PairLoader as PairLoader
from .text.pair_loader import encode_pairs as encode_pairs
from .text.pair_selection import filter_pairs as filter_pairs
from .text.pair_selection import split_pairs as split_pairs
from .text.pairs import SentencePairs as SentencePairs
from .text.pairs import read_pairs as read_pairs
from .text.pairs import read_tsv as read_tsv
from .text.vocabulary import BOS as BOS
from .text.vocabulary import EOS as EOS
from .text.vocabulary import PAD as PAD
from .text.vocabulary import UNK as UNK
from .text.vocabulary import Vocabulary as Vocabulary
from .text.vocabulary import build_vocabulary as build_vocabulary
from .text.vocabulary import load_vocabulary as load_vocabulary
