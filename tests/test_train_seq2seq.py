"""The programs that train a translator and translate with it: what they print and write, and how they end."""

import json
import shutil
import sys
from types import SimpleNamespace

import gluon_mgpu as mgpu
import numpy as np
import pytest
from click.testing import CliRunner
from gluon_mgpu.cli.main import CommandGroup
from gluon_mgpu.cli.train import train_seq2seq
from gluon_mgpu.cli.train_seq2seq import Corpus, _choose_search, _korean_numbers
from gluon_mgpu.cli.translate import translate
from gluon_mgpu.models.seq2seq.translator import TranslatedText, load_translator

from .test_cli import PNG, pressed  # noqa: F401  a fixture

ENGLISH = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
KOREAN = ["영", "일", "이", "삼", "사", "오", "육", "칠", "팔", "구"]
SMALL = ["--hidden-size", "12", "--held-out", "5", "--batch-tokens", "120"]
SMALL += ["--dropout", "0"]  # whose random numbers depend on the devices
WORDS = ["--vocabulary", "words"]
# errors are told as main tells them
program = CommandGroup("gluon-mgpu", commands={"train": train_seq2seq, "translate": translate})


@pytest.fixture(autouse=True)
def exact_match_alone(without_pictures, without_sacrebleu):
    """What sacrebleu says, and the pictures, are tested elsewhere."""


@pytest.fixture
def tsv(tmp_path):
    return write_tsv(tmp_path)


def write_tsv(folder, num_pairs=50):
    """Pairs of one to four digits read out: English, tab, Korean, tab, a note."""
    rng = np.random.RandomState(0)
    numbers = {tuple(rng.randint(0, 10, rng.randint(1, 5)).tolist()) for _ in range(4 * num_pairs)}
    lines = [" ".join(ENGLISH[d] for d in one) + "\t" + " ".join(KOREAN[d] for d in one) + "\tnote" for one in sorted(numbers)]
    path = folder / "numbers.tsv"
    path.write_text("\n".join(lines[:: len(lines) // num_pairs][:num_pairs]) + "\n", encoding="utf-8")
    assert len(path.read_text(encoding="utf-8").splitlines()) == num_pairs
    return path


def invoke(*arguments, **more):
    return CliRunner().invoke(program, [str(argument) for argument in arguments], prog_name="gluon-mgpu", **more)


def run(*arguments, **more):
    result = invoke(*arguments, **more)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def fail(*arguments, exit_code=1, **more):
    result = invoke(*arguments, **more)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert (result.exit_code, "Traceback" in result.output) == (exit_code, False)
    (error,) = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    return error


def train(tsv, out, *options, devices="cpu*2"):
    output = run("train", "--data", tsv, *SMALL, *WORDS, "--devices", devices, "--output", out, *options)
    return output.strip().splitlines(), json.loads((out / "history.json").read_text())["epochs"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A translator that has hardly learnt, for tests that only read it."""
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(sys.modules, "sacrebleu", None)
        train(write_tsv(folder), folder / "run", "--epochs", "2", "--lr", "0.02", "--dropout", "0")
    return folder / "run" / "best"


# train


def test_training_tells_and_writes(tsv, tmp_path):
    out = tmp_path / "new" / "run"
    lines, rows = train(tsv, out, "--epochs", "2")
    assert lines[0] == f"{tsv}: 50 of 50 pairs kept; 0 with an empty side, 0 too long, 0 with too different lengths"
    assert lines[1] == "numbers.tsv: 40 pairs to train on, 5 to validate, 5 to test"
    assert lines[2] == "vocabularies of 14 and 14 tokens, on cpu(0), cpu(1)"
    assert lines[3] == "12 units, dropout 0"
    assert lines[4] == "BLEU and chrF need sacrebleu, which is not installed (extra seq2seq): exact match only"
    epochs = [line for line in lines if line.startswith("epoch ") and "batch" not in line]
    assert [line.split()[1] for line in epochs] == ["1/2", "2/2"]
    assert all("valid exact match" in line and "test" not in line and "tokens/s" in line for line in epochs)
    assert lines[-2] == f"saved curves.png, history.csv, history.json, best and last in {out}"
    assert lines[-1].startswith("test of best, 5 beams: exact match ") and lines[-1].endswith(" tokens/s on cpu(0), cpu(1)")
    written = ["best", "curves.png", "history.csv", "history.json", "last"]
    assert sorted(path.name for path in out.iterdir()) == written
    assert [row["epoch"] for row in rows] == [1, 2]
    assert rows[1]["train_loss"] < rows[0]["train_loss"]
    assert all(0 <= row["valid_exact_match"] <= 100 and row["grad_norm"] > 0 for row in rows)
    assert load_translator(out / "best").options["hidden_size"] == 12


def test_the_network_grows_with_the_corpus(tmp_path):
    for num_train, told in ((2999, "128 units, dropout 0.2"), (3000, "256 units, dropout 0.3")):
        data = write_tsv(tmp_path, num_train + 2)
        options = ["--data", data, "--held-out", "1", *WORDS, "--epochs", "1", "--limit-batches", "1", "--devices", "cpu*1"]
        assert told in run("train", *options, "--output", tmp_path / str(num_train))


def test_the_other_direction(tsv, tmp_path):
    train(tsv, tmp_path / "there", "--epochs", "1")
    train(tsv, tmp_path / "back", "--epochs", "1", "--reverse")
    there, back = (load_translator(tmp_path / name / "best") for name in ("there", "back"))
    assert there.source_vocabulary.tokens(range(14)) == back.target_vocabulary.tokens(range(14))
    assert {"▁four"} <= set(back.target_vocabulary.tokens(range(14))) and "▁사" in back.source_vocabulary.tokens(range(14))


def test_no_progress_stops_it(tsv, tmp_path):
    patience = 2
    lines, rows = train(tsv, tmp_path / "run", "--epochs", "9", "--lr", "1e-30", "--patience", patience)
    assert len(rows) == 1 + patience
    assert any(line.startswith("stopped: valid_loss was best (") and line.endswith("in epoch 1") for line in lines)


def test_ctrl_c_saves_and_ends_with_130(tsv, tmp_path, pressed):  # noqa: F811
    pressed.append((2, 2))
    out = tmp_path / "run"
    result = invoke("train", "--data", tsv, *SMALL, *WORDS, "--devices", "cpu*2", "--epochs", "3", "--output", out)
    assert result.exit_code == 130
    assert "Interrupted. fit: stopped in epoch 2 after step " in result.output
    assert result.output.strip().endswith(f"checkpoints are in {out}; resume with --resume auto")
    assert load_translator(out / "last").translate(["one"])
    progress = json.loads((out / "last" / "checkpoint" / "progress.json").read_text())
    assert (progress["epoch"], progress["epochs_completed"]) == (2, 1)
    assert json.loads((out / "history.json").read_text())["stopped"] == "interrupted"


@pytest.fixture
def few_numbers(monkeypatch):
    """Drawing all Korean numbers takes seconds."""
    monkeypatch.setattr("gluon_mgpu.cli.train_seq2seq.NUM_EXAMPLES", 300)


def test_korean_numbers_are_the_default(few_numbers, tmp_path, pressed):  # noqa: F811
    pressed += [(1, 1), (1, 1)]
    result = invoke("train", "--devices", "cpu*1", "--output", tmp_path / "out")
    first, second, *_ = result.stdout.splitlines()
    assert first.startswith("Korean numbers: 300 pairs to train on, ")
    assert second.startswith("vocabularies of ") and second.endswith(" tokens, on cpu(0)")
    back = invoke("train", "--reverse", "--devices", "cpu*1", "--output", tmp_path / "back")
    assert sorted(second.split()) == sorted(back.stdout.splitlines()[1].split()) and second != back.stdout.splitlines()[1]


def test_the_default_tests_what_it_has_not_seen(few_numbers):
    corpus = _korean_numbers(4)
    parts = [set(part) for part in (corpus.train, corpus.valid, corpus.test)]
    assert len(parts[1]) == len(corpus.valid) > 400 and len(parts[2]) == len(corpus.test) > 400
    assert not parts[0] & parts[1] and not parts[0] & parts[2] and not parts[1] & parts[2]
    assert {one for one, _ in corpus.swapped().test} == {two for _, two in corpus.test}


def test_what_cannot_be_trained_is_refused_before_anything_is_written(tsv, tmp_path):
    usual = ["train", "--data", tsv, *SMALL, *WORDS, "--devices", "cpu", "--output", tmp_path / "out"]
    assert "got 'tpu'" in fail(*usual, "--devices", "tpu")
    assert "more than twice --held-out 25" in fail(*usual, "--held-out", "25")
    assert "No such file" in fail("train", "--data", tmp_path / "none", "--output", tmp_path / "out")
    tsv.write_bytes(tsv.read_bytes() + "zero\t영".encode("cp949"))
    assert "numbers.tsv line 51, which is not UTF-8" in fail(*usual)
    assert not (tmp_path / "out").exists()
    write_tsv(tmp_path)
    (tmp_path / "out" / "last").mkdir(parents=True)
    (tmp_path / "out" / "last" / "thesis.txt").write_text("years of work")
    assert "which holds thesis.txt" in fail(*usual)
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == ["last", "thesis.txt"]


# translate


def translated(*arguments, **more):
    begin, rest = run("translate", *arguments, **more).split("\n", 1)
    assert "translating with " in begin or "is the folder of a run" in begin
    return rest


def test_lines_come_back_in_their_order(model, tmp_path):
    texts = ["two one", "", "three", "nine nine nine four", "unheard of"]
    (tmp_path / "in.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    wanted = load_translator(model).best(texts, beam_size=5)
    note = "line 5: the model has not seen parts of 'unheard of'\n"  # on standard error
    said = translated("--model", model, "--devices", "cpu*1", tmp_path / "in.txt")
    assert said.count(note) == 1 and said.replace(note, "").split("\n") == [*wanted, ""]
    piped = translated("--model", model, "--devices", "cpu*2", "--batch-size", "2", "-", input="\n".join(texts))
    piped = piped.replace(note, "")
    assert piped.split("\n") == [*wanted, ""]
    assert wanted[1] == ""


def test_long_inputs_are_translated_in_parts(model):
    """Of 1024 lines."""
    texts = [f"{one} {other}" for one in ENGLISH for other in ENGLISH]
    found = load_translator(model).translate(texts, beam_size=2, num_best=2) * 11
    numbered = translated("--model", model, "--devices", "cpu*1", "--beam", "2", "--n-best", "2", input="\n".join(texts * 11))
    assert numbered.splitlines() == [f"{i}\t{one.text}" for i, best in enumerate(found, 1) for one in best]


def test_n_best_and_scores(model):
    output = translated("--model", model, "--devices", "cpu*2", "--beam", "4", "--n-best", "3", "--scores", input="one\ntwo")
    rows = [line.split("\t") for line in output.splitlines()]
    found = load_translator(model).translate(["one", "two"], beam_size=4, num_best=3)
    assert rows == [[str(i), f"{one.score:.4f}", one.text] for i, best in enumerate(found, 1) for one in best]
    scores = [float(row[1]) for row in rows]
    assert scores[:3] == sorted(scores[:3], reverse=True)


def test_the_folder_of_a_run_is_its_best_model(model):
    lines = translated("--model", model.parent, "--devices", "cpu*1", input="one\ntwo three").splitlines()
    assert lines[-2:] == load_translator(model).best(["one", "two three"], beam_size=5)


@pytest.mark.parametrize("good, words", [((1, None), "1 beam"), ((5, None), "5 beams"), ((5, 1.25), "5 beams of usual length")])
def test_the_search_of_the_best_validation_score_is_used(model, tmp_path, monkeypatch, good, words):
    asked = []

    def translate(self, texts, *, beam_size, **options):
        search = beam_size, options.get("length_ratio", self.length_ratio)
        asked.append(search)
        right = {"one": "일 이", "two": "이"}
        return [[TranslatedText(right[text] if search == good else "wrong", 0.0, [], [])] for text in texts]

    shutil.copytree(model, tmp_path / "best")
    shutil.copytree(model, tmp_path / "last")
    monkeypatch.setattr("gluon_mgpu.models.seq2seq.translator.Translator.translate", translate)
    pairs = mgpu.data.SentencePairs(("one", "two"), ("일 이", "이"))  # 5 target tokens to 4, with the ends
    best = load_translator(tmp_path / "best")
    corpus, options = Corpus("pairs", pairs, pairs, pairs), SimpleNamespace(data=(), output=tmp_path)
    assert _choose_search(best, corpus, options) == words
    beam, ratio = good
    for folder in ("best", "last"):
        arguments = ["--model", tmp_path / folder, "--devices", "cpu*1"]
        assert translated(*arguments, input="one").endswith("일 이\n")
        assert translated(*arguments, "--n-best", "3", input="one").startswith("1\t")
        assert translated(*arguments, "--beam", "2", input="one").endswith("wrong\n")
        assert asked == [(5, None), (5, 1.25), (1, None), good, (max(3, beam), ratio), (2, ratio)]
        del asked[3:]


def test_attention_is_drawn(model, tmp_path):
    output = translated(
        "--model", model, "--devices", "cpu*1", "--attention", tmp_path / "new" / "a.png", input="\none two\ntwo\n"
    )
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(PNG)
    assert f"saved {tmp_path / 'new' / 'a.png'}" in output
    assert "was not drawn" in translated("--model", model, "--devices", "cpu*1", "--attention", tmp_path / "b.png", input="\n")


def test_what_cannot_be_translated_is_reported(model, tmp_path):
    assert fail("translate", "--model", tmp_path / "none").startswith("Error: load_translator: got ")
    assert "No such file" in fail("translate", "--model", model, "--devices", "cpu*1", tmp_path / "none.txt")
    message = fail("translate", "--model", model, "--devices", "cpu*1", input=b"one\n\xff\n")
    assert message.startswith("Error: translate: got byte 0xff in standard input line 2, which is not UTF-8")
    message = fail("translate", "--model", model, "--devices", "cpu*1", input="one\n".encode("utf-16"))
    assert "UTF-16" in message and "CP949" not in message
    message = fail("translate", "--model", model, "--beam", "2", "--n-best", "3", exit_code=2)
    assert message == "Error: got --n-best 3 of --beam 2; expected at most the beam. Widen the beam."
