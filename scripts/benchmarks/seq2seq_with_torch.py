"""The contender of the seq2seq benchmark on PyTorch: the architecture of `models.Seq2Seq` with its defaults."""

from __future__ import annotations

import importlib
from typing import Any, Dict

from case import Case
from sentences import read_batches

_NONE = -100  # the label that PyTorch's cross-entropy ignores


class Eager:
    """Bidirectional encoder, decoder without input feeding, dot-product attention, cross-entropy of all tokens at once."""

    def __init__(self, case: Case) -> None:
        if case.device != "cpu":
            raise NotImplementedError(f"this contender runs on the CPU only, not on {case.device}")
        self.torch = torch = importlib.import_module("torch")
        torch.manual_seed(0)
        n, nn = case.units, torch.nn
        self.parts = nn.ModuleDict(
            {
                "source": nn.Embedding(case.source_vocabulary, case.embed_size),
                "target": nn.Embedding(case.target_vocabulary, case.embed_size),
                "encoder": nn.GRU(case.embed_size, n, batch_first=True, bidirectional=True),
                "decoder": nn.GRU(case.embed_size, n, batch_first=True),
                "key": nn.Linear(2 * n, n, bias=False),
                "bridge": nn.Linear(2 * n, n),
                "vector": nn.Linear(3 * n, n, bias=False),
                "output": nn.Linear(n, case.target_vocabulary),
            }
        )
        self.batches = [tuple(map(torch.from_numpy, batch)) for batch in read_batches(case.corpus)]
        self.optimizer = torch.optim.Adam(self.parts.parameters(), lr=0.001)
        self.score = self.scores
        for _ in range(2):
            self.train()

    @classmethod
    def versions(cls) -> Dict[str, str]:
        """Return the versions of the libraries of this contender."""
        return {"torch": importlib.import_module("torch").__version__}

    def train(self) -> None:
        """Train on every batch once."""
        cross_entropy = self.torch.nn.functional.cross_entropy
        for source, source_length, target_input, target_output, target_length in self.batches:
            self.optimizer.zero_grad()
            scores = self.score(source, source_length, target_input)
            labels = target_output.long().masked_fill(~self._true(target_output, target_length), _NONE)
            cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=_NONE).backward()
            self.optimizer.step()

    def scores(self, source: Any, source_length: Any, target_input: Any) -> Any:
        """Return scores, shape (B, T, vocabulary)."""
        torch, p = self.torch, self.parts
        values, last = self._encode(p["source"](source), source_length)
        first = torch.tanh(p["bridge"](torch.cat([last[0], last[1]], dim=1)))
        queries, _ = p["decoder"](p["target"](target_input), first[None])
        fits = queries @ p["key"](values).transpose(1, 2)
        fits = fits.masked_fill(~self._true(source, source_length)[:, None], -1e30)
        found = torch.softmax(fits, dim=2) @ values
        return p["output"](torch.tanh(p["vector"](torch.cat([found, queries], dim=2))))

    def _encode(self, embedded: Any, lengths: Any) -> Any:
        """Return outputs and last states. Sequences with padding are packed."""
        encoder, num_tokens = self.parts["encoder"], embedded.shape[1]
        if bool((lengths == num_tokens).all()):
            return encoder(embedded)
        packing: Any = importlib.import_module("torch.nn.utils.rnn")
        packed = packing.pack_padded_sequence(embedded, lengths.long(), batch_first=True, enforce_sorted=False)
        values, last = encoder(packed)
        return packing.pad_packed_sequence(values, batch_first=True, total_length=num_tokens)[0], last

    def _true(self, tokens: Any, lengths: Any) -> Any:
        return self.torch.arange(tokens.shape[1])[None] < lengths[:, None]

    def wait(self) -> None:
        """Return at once: nothing is queued."""
