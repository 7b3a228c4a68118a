"""Data sets of the training programs, and batches of arrays in memory."""

from .array_loader import ArrayLoader
from .idx import load_idx_folder, read_idx
from .images import ImageData, load_digits, load_fashion_mnist, load_mnist
from .sharded_sampler import ShardedSampler, skip_first_batches
from .text.korean_numbers import exact_match, korean_numbers
from .text.length_buckets import balance_shards, padding_share, plan_buckets
from .text.pair_loader import PairLoader, encode_pairs
from .text.pair_selection import FilteredPairs, filter_pairs, split_pairs
from .text.pairs import SentencePairs, normalise, read_pairs, read_tsv
from .text.unigrams import unigram_entropy, unigram_log_p
from .text.vocabularies import build_vocabulary, load_vocabulary
from .text.vocabulary import BOS, EOS, PAD, UNK, Vocabulary, check_vocabulary

__all__ = [
    "ArrayLoader",
    "ShardedSampler",
    "skip_first_batches",
    "ImageData",
    "load_digits",
    "load_fashion_mnist",
    "load_idx_folder",
    "load_mnist",
    "read_idx",
    # sentence pairs
    "SentencePairs",
    "FilteredPairs",
    "read_pairs",
    "read_tsv",
    "filter_pairs",
    "split_pairs",
    "normalise",
    "korean_numbers",
    "exact_match",
    "Vocabulary",
    "build_vocabulary",
    "load_vocabulary",
    "check_vocabulary",
    "PAD",
    "BOS",
    "EOS",
    "UNK",
    "encode_pairs",
    "PairLoader",
    "unigram_log_p",
    "unigram_entropy",
    "plan_buckets",
    "padding_share",
    "balance_shards",
]
