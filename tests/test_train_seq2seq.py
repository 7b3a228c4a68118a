"""The programs that train a translator and translate with it: what they print and write, and how they end."""

import io
import json
import re
import shutil
import signal
import sys

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from click.testing import CliRunner
from gluon_mgpu.cli import main
from gluon_mgpu.cli.train_seq2seq import (
    _DEFAULTS,
    Corpus,
    _choose_search,
    _korean_numbers,
    _schedule,
    _usual_batch_tokens,
    _usual_size,
    train_seq2seq,
)
from gluon_mgpu.cli.translate import translate
from gluon_mgpu.models.seq2seq.translator import TranslatedText, load_translator

PNG = b"\x89PNG\r\n\x1a\n"
ENGLISH = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
KOREAN = ["영", "일", "이", "삼", "사", "오", "육", "칠", "팔", "구"]
SMALL = ["--embed-size", "8", "--hidden-size", "12", "--num-validation", "5", "--num-test", "4", "--batch-tokens", "120"]
SMALL += ["--dropout", "0"]  # whose random numbers depend on the devices
WORDS = ["--source-vocabulary", "words", "--target-vocabulary", "words"]
program = type(main)(
    "gluon-mgpu", commands={"train": train_seq2seq, "translate": translate}
)  # errors are told as main tells them


@pytest.fixture(autouse=True)
def without_sacrebleu(without_pictures, monkeypatch):
    """As with the extra `train` alone; what sacrebleu says, and the pictures, are tested elsewhere."""
    hide_sacrebleu(monkeypatch)


def hide_sacrebleu(monkeypatch):
    for module in ("cli.train_seq2seq", "translation_scores"):
        monkeypatch.setattr(f"gluon_mgpu.{module}.has_sacrebleu", lambda: False)


@pytest.fixture
def tsv(tmp_path):
    return write_tsv(tmp_path)


def write_tsv(folder):
    """50 pairs of one to four digits read out: English, tab, Korean, tab, a note."""
    rng = np.random.RandomState(0)
    numbers = {tuple(rng.randint(0, 10, rng.randint(1, 5)).tolist()) for _ in range(200)}
    lines = [" ".join(ENGLISH[d] for d in one) + "\t" + " ".join(KOREAN[d] for d in one) + "\tnote" for one in sorted(numbers)]
    path = folder / "numbers.tsv"
    path.write_text("\n".join(lines[::2][:50]) + "\n", encoding="utf-8")
    assert len(path.read_text(encoding="utf-8").splitlines()) == 50
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


def train(tsv, out, *options, devices="cpu:2"):
    output = run("train", "--tsv", tsv, *SMALL, *WORDS, "--devices", devices, "--output", out, *options)
    return output.strip().splitlines(), json.loads((out / "history.json").read_text())["epochs"]


def losses(rows):
    return [row["train_loss"] for row in rows] + [row["test_loss"] for row in rows]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A translator that has hardly learnt, for tests that only read it."""
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as monkeypatch:
        hide_sacrebleu(monkeypatch)
        train(write_tsv(folder), folder / "run", "--epochs", "2", "--lr", "0.02", "--dropout", "0")
    return folder / "run" / "best"


# train


def test_training_tells_and_writes(tsv, tmp_path):
    out = tmp_path / "new" / "run"
    lines, rows = train(tsv, out, "--epochs", "2")
    assert lines[0] == f"{tsv}: 50 of 50 pairs kept; 0 too short, 0 too long, 0 with too different lengths"
    assert lines[1] == "numbers.tsv: 41 pairs to train on, 5 to validate, 4 to test"
    assert lines[2] == "14 words to 14 words, on cpu(0), cpu(1)"
    assert re.fullmatch(r"entropy of the unigrams: 2\.\d{4} nats per token; the validation loss .*", lines[3])
    assert lines[4] == "BLEU and chrF need sacrebleu, which is not installed (extra seq2seq): exact match only"
    epochs = [line for line in lines if line.startswith("epoch ") and "batch" not in line]
    assert [line.split()[1] for line in epochs] == ["1/2", "2/2"]
    assert all("test exact match" in line and "tokens/s" in line for line in epochs)
    assert lines[-2] == f"saved curves.png, history.csv, history.json, best and last in {out}"
    assert lines[-1].startswith("test of best, 5 beams: exact match ") and lines[-1].endswith(" tokens/s on cpu(0), cpu(1)")
    written = ["best", "command.json", "curves.png", "history.csv", "history.json", "last"]
    assert sorted(path.name for path in out.iterdir()) == written
    assert [row["epoch"] for row in rows] == [1, 2]
    assert rows[1]["train_loss"] < rows[0]["train_loss"]
    assert all(0 <= row["test_exact_match"] <= 100 and row["grad_norm"] > 0 for row in rows)
    assert load_translator(out / "best").options["hidden_size"] == 12


@pytest.mark.exhaustive
def test_it_learns_to_read_digits(tsv, tmp_path):
    options = ["--epochs", "25", "--lr", "0.03", "--patience", "25", "--hidden-size", "24", "--batch-tokens", "60"]
    train(tsv, tmp_path / "run", *options, devices="cpu:1")
    english, korean, _ = zip(*(line.split("\t") for line in tsv.read_text(encoding="utf-8").splitlines()))
    last = tmp_path / "run" / "last"
    said = run("translate", "--model", last, "--devices", "cpu:2", input="\n".join(english)).splitlines()
    assert sum(a == b for a, b in zip(said, korean)) >= 30


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [[], ["--layout", "TNC", "--cell", "lstm", "--attention", "additive", "--input-feeding"]])
def test_two_devices_train_as_one(tsv, tmp_path, options):
    _, one = train(tsv, tmp_path / "1", "--epochs", "2", *options, devices="cpu:1")
    for name, more in (("2", []), ("shares", ["--weights", "3,1"]), ("parts", ["--micro-steps", "2"])):
        _, two = train(tsv, tmp_path / name, "--epochs", "2", *options, *more)
        assert losses(two) == pytest.approx(losses(one), rel=1e-4), name


def test_the_seed_decides_everything(tsv, tmp_path):
    found = []
    for name, seed in (("1", "5"), ("2", "5"), ("3", "6")):
        mx.random.seed(len(found))
        np.random.seed(len(found))
        found.append(losses(train(tsv, tmp_path / name, "--epochs", "1", "--seed", seed, "--dropout", "0.2")[1]))
    assert found[0] == found[1] != found[2]


def test_the_other_direction(tsv, tmp_path):
    train(tsv, tmp_path / "there", "--epochs", "1")
    train(tsv, tmp_path / "back", "--epochs", "1", "--reverse")
    there, back = (load_translator(tmp_path / name / "best") for name in ("there", "back"))
    assert there.source_vocabulary.tokens(range(14)) == back.target_vocabulary.tokens(range(14))
    assert {"four"} <= set(back.target_vocabulary.tokens(range(14))) and "사" in back.source_vocabulary.tokens(range(14))


def test_two_files_are_a_tsv(tsv, tmp_path):
    columns = list(zip(*(line.split("\t")[:2] for line in tsv.read_text(encoding="utf-8").splitlines())))
    for name, column in zip(("a.txt", "b.txt"), columns):
        (tmp_path / name).write_text("\n".join(column) + "\n", encoding="utf-8")
    files = ["--source", tmp_path / "a.txt", "--target", tmp_path / "b.txt"]
    run("train", *files, *SMALL, *WORDS, "--devices", "cpu:2", "--epochs", "1", "--output", tmp_path / "files")
    _, rows = train(tsv, tmp_path / "tsv", "--epochs", "1")
    assert losses(json.loads((tmp_path / "files" / "history.json").read_text())["epochs"]) == losses(rows)


@pytest.mark.exhaustive
def test_options_change_what_they_name(tsv, tmp_path):
    _, usual = train(tsv, tmp_path / "usual", "--epochs", "2")
    changes = {
        "smoothing": ["--label-smoothing", "0.2"],
        "dropout": ["--dropout", "0.3"],
        "clipping": ["--clip-norm", "0.01", "--optimizer", "sgd"],
        "cutting": ["--clip-value", "0.00001", "--optimizer", "sgd"],
        "plateau": ["--schedule", "plateau"],
        "apart": ["--average-every", "3"],
        "layers": ["--num-layers", "2"],
        "tied": ["--tied", "--embed-size", "12"],
        "shape": ["--batch-tokens", "60"],
    }
    found = [losses(train(tsv, tmp_path / name, "--epochs", "2", *options)[1]) for name, options in changes.items()]
    assert len({tuple(one) for one in [losses(usual), *found]}) == len(changes) + 1
    _, off = train(tsv, tmp_path / "off", "--epochs", "2", "--hybridize", "off")
    assert losses(off) == pytest.approx(losses(usual), rel=1e-5)


@pytest.mark.exhaustive
def test_the_rate_warms_up_and_falls(tsv, tmp_path):
    _, rows = train(tsv, tmp_path / "run", "--epochs", "6", "--lr", "0.01", "--patience", "9")
    rates = [row["learning_rate"] for row in rows]
    assert rates == sorted(rates, reverse=True)
    assert 0.005 < rates[0] <= 0.01 and rates[-1] < 0.001
    _, rows = train(tsv, tmp_path / "plateau", "--epochs", "4", "--lr", "1e-9", "--schedule", "plateau", "--patience", "9")
    assert [row["learning_rate"] for row in rows[:1]] == [1e-9]
    assert rows[-1]["learning_rate"] <= 1e-9


def test_a_network_that_learns_nothing_is_reported(tsv, tmp_path):
    """At a rate of nearly 0, it remains where its bias lets it begin: near the entropy of the unigrams."""
    lines, rows = train(tsv, tmp_path / "stuck", "--epochs", "1", "--lr", "1e-9")
    entropy = float(re.search(r"unigrams: (\S+)", lines[3]).group(1))
    assert rows[0]["test_loss"] == pytest.approx(entropy, rel=0.1)
    warned = [line for line in lines if line.startswith("after epoch 1, the validation loss ")]
    assert len(warned) == (rows[0]["test_loss"] >= entropy)
    lines, _ = train(tsv, tmp_path / "wild", "--epochs", "1", "--lr", "1", "--dropout", "0.9")
    (warned,) = [line for line in lines if line.startswith("after epoch 1, the validation loss ")]
    assert f"is not below {entropy:.4f}, the entropy of the unigrams" in warned and "--vocabulary-size" in warned


def test_no_progress_stops_it(tsv, tmp_path):
    lines, rows = train(tsv, tmp_path / "run", "--epochs", "9", "--lr", "20", "--optimizer", "sgd", "--patience", "1")
    assert len(rows) < 9
    assert any(line.startswith("stopped: test_loss was best (") for line in lines)


def test_memory_and_hangs_are_watched_on_demand(tsv, tmp_path):
    trace = tmp_path / "trace.json"
    options = ["--watchdog", "200", "--leak-check", "--weights", "auto", "--trace", str(trace)]
    lines, _ = train(tsv, tmp_path / "run", "--epochs", "2", "--batch-tokens", "50", *options)
    assert any(line.startswith("host: ") for line in lines)
    assert any(line.startswith("trace: ") for line in lines)
    assert trace.exists() and trace.with_suffix(".png").exists()


def test_ctrl_c_saves_and_ends_with_130(tsv, tmp_path, monkeypatch):
    class Interrupting(mgpu.data.PairLoader):
        def __iter__(self):
            for number, pair in enumerate(super().__iter__(), 1):
                if self.shuffle and (self.epoch, number) == (2, 2):
                    signal.raise_signal(signal.SIGINT)
                yield pair

    monkeypatch.setattr("gluon_mgpu.cli.train_seq2seq.PairLoader", Interrupting)
    out = tmp_path / "run"
    result = invoke("train", "--tsv", tsv, *SMALL, *WORDS, "--devices", "cpu:2", "--epochs", "3", "--output", out)
    assert result.exit_code == 130
    assert "Interrupted. fit: stopped in epoch 2 after step " in result.output
    assert result.output.strip().endswith(f"checkpoints are in {out}; resume with --resume auto")
    assert load_translator(out / "last").translate(["one"])
    progress = json.loads((out / "last" / "checkpoint" / "progress.json").read_text())
    assert (progress["epoch"], progress["epochs_completed"]) == (2, 1)
    assert json.loads((out / "history.json").read_text())["stopped"] == "interrupted"


def test_korean_numbers_are_the_default(tmp_path, monkeypatch):
    def no_fit(*arguments, **kwargs):
        raise KeyboardInterrupt("enough")

    made = []
    monkeypatch.setattr(
        "gluon_mgpu.cli.train_seq2seq._korean_numbers", lambda options: made.append(_korean_numbers(options)) or made[0]
    )
    monkeypatch.setattr("gluon_mgpu.cli._training.fit", no_fit)
    result = invoke("train", "--num-examples", "700", "--devices", "cpu:1", "--output", tmp_path / "out")
    first, second, *_ = result.stdout.splitlines()
    assert first.startswith("Korean numbers: 700 pairs to train on, ")
    assert " characters to " in second and second.endswith(" words, on cpu(0)")
    monkeypatch.setattr("gluon_mgpu.cli.train_seq2seq._korean_numbers", lambda options: made[0])  # drawing them takes seconds
    back = invoke("train", "--num-examples", "700", "--reverse", "--devices", "cpu:1", "--output", tmp_path / "out")
    assert " words to " in back.stdout.splitlines()[1]


def test_the_default_tests_what_it_has_not_seen():
    corpus = _korean_numbers({"num_examples": 1000, "seed": 4})
    parts = [set(part) for part in (corpus.train, corpus.valid, corpus.test)]
    assert len(parts[1]) == len(corpus.valid) > 400 and len(parts[2]) == len(corpus.test) > 400
    assert not parts[0] & parts[1] and not parts[0] & parts[2] and not parts[1] & parts[2]
    assert {one for one, _ in corpus.swapped().test} == {two for _, two in corpus.test}


@pytest.mark.parametrize(
    "options, told",
    [
        (["--devices", "tpu"], "Error: use_devices: got 'tpu'"),
        (
            ["--num-test", "46"],
            "Error: train seq2seq: got 50 pairs; expected more than --num-validation 5 and --num-test 46 together",
        ),
        (["--batch-tokens", "3"], "Error: plan_buckets: got examples of up to 5 and 5 tokens for batches of 3"),
        (["--tied"], "Error: Seq2Seq: got tied=True with embed_size=8 and hidden_size=12"),
    ],
)
def test_what_cannot_be_trained_is_told_before_anything_is_written(tsv, tmp_path, options, told):
    arguments = ["--tsv", tsv, *SMALL, *WORDS, "--devices", "cpu:1", "--output", tmp_path / "out", *options]
    assert fail("train", *arguments).startswith(told)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [["--source", "a"], ["--target", "a"], ["--source", "a", "--target", "b", "--tsv", "c"]])
def test_half_a_corpus_is_wrong_usage(tmp_path, options):
    message = fail("train", *options, "--output", tmp_path / "out", exit_code=2)
    assert message == "Error: got one file of two, or files and --tsv; expected --source and --target, or --tsv alone."


def test_a_bad_file_is_told_with_its_line(tsv, tmp_path):
    assert "No such file" in fail("train", "--tsv", tmp_path / "none", "--output", tmp_path / "out")
    tsv.write_bytes(tsv.read_bytes() + "zero\t영".encode("cp949"))
    message = fail("train", "--tsv", tsv, "--output", tmp_path / "out")
    assert message.startswith("Error: read_tsv: got byte 0x") and "numbers.tsv line 51, which is not UTF-8" in message


def test_an_output_that_holds_something_else_is_not_replaced(tsv, tmp_path):
    (tmp_path / "out" / "last").mkdir(parents=True)
    (tmp_path / "out" / "last" / "thesis.txt").write_text("years of work")
    message = fail("train", "--tsv", tsv, *SMALL, *WORDS, "--epochs", "1", "--devices", "cpu:1", "--output", tmp_path / "out")
    assert message.startswith("Error: SaveTranslator: got ") and "which holds thesis.txt" in message
    assert (tmp_path / "out" / "last" / "thesis.txt").read_text() == "years of work"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["last"]  # told before the first epoch


# translate


def test_lines_come_back_in_their_order(model, tmp_path):
    texts = ["two one", "", "three", "nine nine nine four", "unheard of"]
    (tmp_path / "in.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    wanted = load_translator(model).best(texts, beam_size=5)
    note = "line 5: the model has not seen parts of 'unheard of'\n"  # on standard error
    said = run("translate", "--model", model, "--devices", "cpu:1", tmp_path / "in.txt")
    assert said.count(note) == 1 and said.replace(note, "").split("\n") == [*wanted, ""]
    piped = run("translate", "--model", model, "--devices", "cpu:2", "--batch-size", "2", input="\n".join(texts))
    piped = piped.replace(note, "")
    assert piped.split("\n") == [*wanted, ""]
    assert wanted[1] == ""


def test_long_inputs_are_translated_in_parts(model, monkeypatch):
    texts = [f"{one} {other}" for one in ENGLISH for other in ENGLISH[:2]]
    whole = run("translate", "--model", model, "--devices", "cpu:1", "--beam", "1", "--n-best", "1", input="\n".join(texts))
    monkeypatch.setattr("gluon_mgpu.cli.translate._AT_ONCE", 7)
    assert run("translate", "--model", model, "--devices", "cpu:1", "--beam", "1", input="\n".join(texts)) == whole
    numbered = run("translate", "--model", model, "--devices", "cpu:1", "--beam", "2", "--n-best", "2", input="\n".join(texts))
    assert [line.split("\t")[0] for line in numbered.splitlines()] == [str(i) for i in range(1, 21) for _ in range(2)]


def test_n_best_and_scores(model):
    output = run(
        "translate", "--model", model, "--devices", "cpu:2", "--beam", "4", "--n-best", "3", "--scores", input="one\ntwo"
    )
    rows = [line.split("\t") for line in output.splitlines()]
    found = load_translator(model).translate(["one", "two"], beam_size=4, num_best=3)
    assert rows == [[str(i), f"{one.score:.4f}", one.text] for i, best in enumerate(found, 1) for one in best]
    scores = [float(row[1]) for row in rows]
    assert scores[:3] == sorted(scores[:3], reverse=True)


def test_repeats_are_limited_on_demand(model, monkeypatch):
    asked = []

    def translate(self, texts, **options):
        asked.append(options["max_repeats"])
        return [[TranslatedText("said", 0.0, [], [])] for _ in texts]

    monkeypatch.setattr("gluon_mgpu.models.seq2seq.translator.Translator.translate", translate)
    for options in ([], ["--max-repeats", "0"], ["--max-repeats", "1"]):
        assert run("translate", "--model", model, "--devices", "cpu:1", *options, input="one") == "said\n"
    assert asked == [2, None, 1]


def test_the_folder_of_a_run_is_its_best_model(model):
    texts = "one\ntwo three"
    assert run("translate", "--model", model.parent, "--devices", "cpu:1", input=texts).splitlines()[-2:] == load_translator(
        model
    ).best(texts.split("\n"), beam_size=5)


@pytest.mark.parametrize("good, words", [((1, None), "1 beam"), ((5, None), "5 beams"), ((5, 1.25), "5 beams of usual length")])
def test_the_search_of_the_best_validation_score_is_used(model, tmp_path, monkeypatch, good, words):
    asked = []

    def translate(self, texts, *, beam_size, **options):
        search = beam_size, options.get("length_ratio", self.length_ratio)
        asked.append(search)
        return [[TranslatedText(text if search == good else "wrong", 0.0, [], [])] for text in texts]

    shutil.copytree(model, tmp_path / "best")
    shutil.copytree(model, tmp_path / "last")
    monkeypatch.setattr("gluon_mgpu.models.seq2seq.translator.Translator.translate", translate)
    pairs = mgpu.data.SentencePairs(("one", "two"), ("one two", "two"))  # 5 target tokens to 4, with the ends
    best = load_translator(tmp_path / "best")
    corpus, options = Corpus("pairs", pairs, pairs, pairs), {"tsv": None, "source": None, "target": None}
    monkeypatch.setattr("gluon_mgpu.cli.train_seq2seq.translation_scores", lambda texts, _: {"exact_match": texts.count("one")})
    assert _choose_search(best, corpus, tmp_path, options) == words
    beam, ratio = good
    for folder in ("best", "last"):
        arguments = ["translate", "--model", tmp_path / folder, "--devices", "cpu:1"]
        assert run(*arguments, input="one").endswith("one\n")
        assert run(*arguments, "--n-best", "3", input="one").startswith("1\t")
        assert run(*arguments, "--beam", "2", input="one").endswith("wrong\n")
        assert asked == [(5, None), (5, 1.25), (1, None), good, (max(3, beam), ratio), (2, ratio)]
        del asked[3:]


def test_defaults_are_those_of_the_data(tmp_path):
    parsed = {}
    for name, words in (("numbers", []), ("text", ["--tsv", tmp_path / "a.tsv"]), ("chosen", ["--tsv", "a", "--dropout", "0"])):
        parsed[name] = train_seq2seq.make_context("train", [str(word) for word in words]).params
    for name, (numbers, text) in _DEFAULTS.items():
        assert (parsed["numbers"][name], parsed["text"][name]) == (numbers, text)
    assert (parsed["chosen"]["dropout"], parsed["chosen"]["label_smoothing"]) == (0.0, _DEFAULTS["label_smoothing"][1])
    assert parsed["text"]["vocabulary_size"] is None
    assert parsed["text"]["patience"] >= parsed["text"]["epochs"]  # scores of a beginner vary; the rate falls in every epoch


@pytest.mark.parametrize(
    "sentence, num, size",
    [("ab", 10_000, 2 + 125), ("ab a ab a ab", 100, 3 + 140), ("ab a ab a ab", 10_000, 3 + 1398), ("ab " * 40, 10_000, 8000)]
    + [("가나다" * 4, 100, 3 + 35)],  # without spaces: 6 characters count as a word
)
def test_a_small_corpus_has_few_subwords_and_one_of_long_sentences_more(sentence, num, size):
    sentences = [sentence] * num
    assert _usual_size(sentences, "subwords") == size
    assert _usual_size(sentences, "words") == 8000


@pytest.mark.parametrize("num, tokens", [(100, 720), (10_000, 800), (10**5, 1200)])
def test_a_small_corpus_has_small_batches(num, tokens):
    train = [[7] * 9] * num, [[7] * 9] * num  # 10 tokens with the end
    assert _usual_batch_tokens([train, ([[7]], [[7]])]) == tokens


def test_by_default_each_pair_fits_into_a_batch(tmp_path):
    path = tmp_path / "long.tsv"
    path.write_text("".join(f"a{i} b c\td{i} e\n" for i in range(20)) + "b " * 400 + "\t" + "d " * 399 + "\n", encoding="utf-8")
    options = [word for word in SMALL if word not in ("--batch-tokens", "120")]
    run("train", "--tsv", path, *options, *WORDS, "--devices", "cpu:1", "--epochs", 1, "--output", tmp_path / "run")
    long = [[7] * 400], [[7] * 399]
    assert _usual_batch_tokens([([[7]], [[7]]), long]) == 801


def test_rare_characters_do_not_count():
    assert _usual_size(["ab"] * 5000 + ["c"], "subwords") == 2 + 88


def test_at_a_terminal_each_line_is_answered(model, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("one\ntwo three\n"))
    translate.main(["--model", str(model), "--devices", "cpu:1"], standalone_mode=False)
    out, told = capsys.readouterr()
    one, two = load_translator(model).best(["one", "two three"], beam_size=5)
    assert out.replace("> ", "").splitlines() == [one, two]
    assert told == "Type a sentence. Ctrl-D ends.\n"


def test_attention_is_drawn(model, tmp_path):
    output = run(
        "translate", "--model", model, "--devices", "cpu:1", "--attention", tmp_path / "new" / "a.png", input="\none two\ntwo\n"
    )
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(PNG)
    assert f"saved {tmp_path / 'new' / 'a.png'}" in output


def test_nothing_in_is_nothing_out(model):
    assert run("translate", "--model", model, "--devices", "cpu:1", input="") == ""


def test_what_cannot_be_translated_is_told(model, tmp_path):
    assert fail("translate", "--model", tmp_path / "none").startswith("Error: load_translator: got ")
    assert "No such file" in fail("translate", "--model", model, "--devices", "cpu:1", tmp_path / "none.txt")
    message = fail("translate", "--model", model, "--devices", "cpu:1", input=b"one\n\xff\n")
    assert (
        message == "Error: translate: got byte 0xff on standard input, which is not UTF-8; expected UTF-8. Convert it with iconv."
    )
    message = fail("translate", "--model", model, "--beam", "2", "--n-best", "3", exit_code=2)
    assert message == "Error: got --n-best 3 of --beam 2; expected as many or fewer. Widen the beam."


def test_schedules_warm_up_over_a_tenth_of_a_short_run():
    plateau, cosine = (_schedule({"schedule": kind, "lr": 0.5, "epochs": 4}, 10) for kind in ("plateau", "cosine"))
    assert [plateau(step) for step in (0, 4, 40)] == [pytest.approx(rate) for rate in (0.05, 0.5, 0.5)]
    assert [cosine(step) for step in (0, 4, 40)] == [pytest.approx(rate) for rate in (0.05, 0.5, 0.0)]
