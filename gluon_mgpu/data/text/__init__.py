"""Sentence pairs: read, filter, encode, batch."""
