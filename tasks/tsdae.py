"""TSDAE sentence embeddings, trained from nothing and scored on the STS Benchmark (Wang et al. 2021, arXiv 2104.06979).

    python tasks/tsdae.py                               train, score on STS, beside the baselines
    python tasks/tsdae.py --data FILE                   on any text, one sentence a line (plain, .gz, .zip)
    python tasks/tsdae.py --ablate                      noise, ratio, pooling, tying: a table and a figure
    python tasks/tsdae.py --ablate ratio --jobs 2       one of them, two runs at a time
    python tasks/tsdae.py --resume runs/tsdae/...       go on with a run that was stopped
    python tasks/tsdae.py --encode FILE --checkpoint runs/tsdae/... --out vectors.npy
                                                        the embedding of each line of a file, (n, d) float32
    python tasks/tsdae.py --encode FILE --checkpoint runs/tsdae/... --nearest "A man plays a guitar."
                                                        the lines of a file that are nearest to a sentence

A transformer encoder reads a sentence of which most words are deleted and makes one vector of it; a decoder, which sees
nothing else of the encoder, rebuilds the whole sentence word by word. The encoder alone gives a sentence's embedding.
It has learned something if the cosine of two embeddings orders pairs of sentences as people do: the score is Spearman's
rank correlation with the gold scores of the STS Benchmark, which are used for nothing else.

Data: --data, else $MINIGRAD_DATA, else ~/.cache/minigrad: a folder with wikisplit_sentences.txt (or .gz) and the STS
Benchmark (sts-train.csv, sts-dev.csv, sts-test.csv, or Stsbenchmark.tar.gz, which is fetched where it is missing),
there or one folder below. The sentences of sts-train.csv, without their scores, belong to the training text
(--no-sts-text: they do not). With --data FILE the text is that file; --sts FOLDER says where the benchmark is,
--sts none trains without.

Defaults: encoder and decoder of 2 layers each, d = 128, 4 heads, tied, [CLS], 1.3 million parameters; 4,000 words and
2,000 buckets for rarer ones; sentences of at most 18 words, those of the benchmark three times an epoch; 30 % of the
words deleted (--ratio 0.6, the paper's, is for a model that starts from BERT: it learns too slowly from nothing); AdamW
4e-3, warm-up, cosine to 0, global norm clipped at 1; 2,000 steps of 64 sentences.

Expect: 8 to 12 minutes on one core. Spearman on the 1,000 dev pairs of the shared files 0.50 untrained, 0.57 after 400
steps, 0.60 at the end; on the 879 test pairs 0.52, above a bag of words (0.50), below TF-IDF (0.63). A run folder
(runs/tsdae/TIME) with config.json, log.csv, sts.png, loss.png, alignment-uniformity.png, grad_norm.png, scores.png
(beside the baselines), last and best checkpoints, result.json. With --ablate a folder for each run, ablation.md,
ablation.json, ablation.png.
"""

from tasks.frame.common import (  # first: it sets the number of BLAS threads
    clip_settings,
    device_of,
    go_on,
    make_optimizer,
    number,
    parser_for,
    run,
    say,
    schedule_of,
    settings_of,
    steps_of,
    whole,
)

# isort: split
import hashlib
import io
import json
import os
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minigrad.backend import asnumpy, to_device
from minigrad.data import DataError, data_folder
from minigrad.data.files import Official, check_content, find_file, read_unpacked
from minigrad.data.sentences import (
    NOISES,
    UNK,
    DenoisingBatches,
    WordVocabulary,
    enclosed,
    padded,
    read_sentences,
    words_of,
)
from minigrad.data.sts import find_sts
from minigrad.losses import softmax_cross_entropy
from minigrad.tensors import fill_exactly, load_tensors, write_atomically
from minigrad.training.checkpoint import model_tensors
from minigrad.training.trainer import Trainer
from models.tsdae import POOLINGS, TSDAE
from tasks import tsdae_ablate, tsdae_figures, tsdae_score
from tasks.frame.run_folder import UsageError, open_run_folder

WIKI = Official("wikisplit_sentences.txt", "", 5_659_299,
                "sha256:59b9de4dbb70f4d3035644eaf3ca2cccfd1421dd2466cbb1fb6095e947cbb1d3")
DEFAULTS = {
    "data": None, "sts": None, "no_sts_text": False, "sts_times": 3, "longest": 18, "vocab": 6000, "buckets": 2000,
    "width": 128, "heads": 4, "layers": 2, "length": 26, "pooling": "cls", "no_tie": False, "norm": "pre",
    "activation": "gelu_tanh", "dropout": 0.0, "attention_dropout": 0.0, "noise": "delete", "ratio": 0.3,
    "batch_size": 64, "optimizer": "adamw", "lr": 4e-3, "eps": None, "weight_decay": 0.01, "schedule": "cosine",
    "warmup": None, "clip_norm": 1.0, "eval_every": 200, "ablate": None, "jobs": 1}
DESCRIBED = [key for key in DEFAULTS if key not in ("data", "sts", "noise", "ratio", "pooling", "no_tie", "eval_every",
                                                    "ablate", "jobs")]
STEPS = 2000
LAST = tsdae_ablate.LAST
LOG_EVERY = 20
HELD_OUT = 256                                      # sentences that are not trained on
SHOWN = 3                                           # of them, rebuilt at the end
WITH_ENCODE = {"encode", "nearest", "top", "checkpoint", "out", "batch_size", "device", "threads", "quiet"}


def parse(argv):
    """The settings of this run; see `--help`."""
    parser = parser_for("tsdae", __doc__, data="a text, one sentence a line, or a folder with the data (default "
                                               "$MINIGRAD_DATA, then ~/.cache/minigrad)")
    own = parser.add_argument_group("of this task")
    own.add_argument("--sts", metavar="FOLDER", help="where the STS Benchmark is; none: train without it (default: "
                                                     "the data folder)")
    own.add_argument("--no-sts-text", action="store_true", default=None,
                     help="leave the sentences of sts-train.csv out of the training text")
    own.add_argument("--sts-times", type=whole(1), help="how often an epoch meets these (default 3)")
    own.add_argument("--longest", type=whole(0), help="leave sentences of more words out of the training text; 0: none "
                                                      "(default 18)")
    own.add_argument("--noise", choices=list(NOISES), help="default delete")
    own.add_argument("--ratio", type=number(0), help="share of words that the noise touches: with delete, the share "
                                                     "that is deleted (default 0.3; the paper's is 0.6)")
    own.add_argument("--pooling", choices=POOLINGS, help="the embedding: the output at [CLS], the mean or the maximum "
                                                         "over the sentence (default cls)")
    own.add_argument("--no-tie", action="store_true", default=None, help="a decoder with weights of its own")
    own.add_argument("--vocab", type=whole(6), help="ids: the most frequent words, then the buckets (default 6,000)")
    own.add_argument("--buckets", type=whole(0), help="ids that rarer words share by their hash; 0: all are [UNK] "
                                                      "(default 2,000)")
    own.add_argument("--width", type=whole(1), help=f"d (default {DEFAULTS['width']})")
    own.add_argument("--heads", type=whole(1), help="default 4")
    own.add_argument("--layers", type=whole(1), help="of encoder and decoder each (default 2)")
    own.add_argument("--length", type=whole(3), help="words of a sentence at most, [CLS] and [SEP] counted (default "
                                                     f"{DEFAULTS['length']}); what lies beyond is cut off")
    own.add_argument("--norm", choices=["pre", "post"], help="layer norm before each part or behind (default pre)")
    own.add_argument("--activation", choices=["relu", "gelu", "gelu_tanh"], help="default gelu_tanh")
    own.add_argument("--dropout", type=number(0), help="default 0")
    own.add_argument("--attention-dropout", type=number(0), help="of the self-attention's weights (default 0)")
    own.add_argument("--eps", type=number(0, open_low=True), help="the optimizer's eps (default: its own)")
    own.add_argument("--weight-decay", type=number(0), help="default 0.01")
    own.add_argument("--schedule", choices=["cosine", "constant"], help="of the learning rate (default cosine, to 0)")
    own.add_argument("--warmup", type=whole(0), help="steps of growing learning rate (default 1/20 of all)")
    own.add_argument("--ablate", metavar="A,B", nargs="?", const=",".join(tsdae_ablate.GROUPS),
                     help=f"train one model for each of {', '.join(tsdae_ablate.GROUPS)} (alone: all)")
    own.add_argument("--jobs", type=whole(1), help="runs of --ablate at a time (default 1)")
    other = parser.add_argument_group("to use a trained encoder")
    other.add_argument("--encode", metavar="FILE", help="embed each line of a file with the model of --checkpoint")
    other.add_argument("--checkpoint", metavar="FILE", help="a checkpoint, or the folder of a run (its best one)")
    other.add_argument("--nearest", metavar="TEXT", help="print the lines that are nearest to this sentence")
    other.add_argument("--top", type=whole(1), help="how many of them (default 10)")
    given = {key for key, value in vars(parser.parse_args(argv)).items() if value is not None}
    settings = settings_of(parser, argv, lambda given: DEFAULTS)
    _require_fitting(given, settings)
    return settings


def _require_fitting(given, settings):
    """Raise UsageError for flags that contradict one another."""
    if "encode" in given:
        foreign = sorted(given - WITH_ENCODE)
        if foreign:
            raise UsageError(f"--{foreign[0].replace('_', '-')} has no meaning with --encode: the model is the "
                             "checkpoint's")
        if "checkpoint" not in given:
            raise UsageError("--encode needs --checkpoint FILE, a checkpoint or the folder of a run")
        if not given & {"out", "nearest"}:
            raise UsageError("--encode needs --out FILE.npy, for the vectors, or --nearest TEXT, or both")
        if "top" in given and "nearest" not in given:
            raise UsageError("--top has a meaning only with --nearest TEXT")
        return
    for flag in ("checkpoint", "nearest", "top"):
        if flag in given:
            raise UsageError(f"--{flag} has a meaning only with --encode FILE")
    if settings["ratio"] > 1:
        raise UsageError(f"--ratio is {settings['ratio']:g}; expected a share, 0 ... 1")
    if settings["width"] % settings["heads"]:
        raise UsageError(f"--heads is {settings['heads']}; expected a divisor of --width, {settings['width']}")
    if settings["ablate"] is not None:
        tsdae_ablate.names_of(settings["ablate"])
        if settings["sts"] == "none":
            raise UsageError("--ablate compares scores on the STS Benchmark; expected --sts FOLDER, not none")
    elif "jobs" in given:
        raise UsageError("--jobs has a meaning only with --ablate")


# ---- the text --------------------------------------------------------------------------------------------


class Corpus(NamedTuple):
    """The training text, what is held out of it, and the STS Benchmark."""

    text: list                  # [str] different sentences
    train: list                 # [str] those to train on: not too long, the benchmark's several times
    held_out: list              # [str] in neither
    sts: dict | None            # {"train", "dev", "test": Pairs}
    record: dict                # what is kept of it with a result
    path: Path


def open_corpus(settings):
    """The text and the benchmark that the settings name. Raises DataError or UsageError where there is none."""
    given = settings["data"]
    if given is not None and not Path(given).exists():
        raise UsageError(f"--data {given}: there is no such file or folder")
    folder = data_folder(given)
    path = folder if folder.is_file() else find_wiki(folder)
    sentences, sts = read_sentences(path), open_sts(settings, data_folder() if folder.is_file() else folder)
    of_sts = set() if not sts or settings["no_sts_text"] else {*sts["train"].first, *sts["train"].second}
    sentences = list(dict.fromkeys([*sentences, *sorted(of_sts)]))
    longest = settings["longest"]
    fit = [s for s in sentences if s in of_sts or not longest or len(words_of(s)) <= longest]
    count = min(HELD_OUT, len(fit) // 10)
    if not count:
        at_most = f" of at most --longest {longest} words" if longest else ""
        raise DataError(f"{path}: {len(fit)} different sentences{at_most}; expected at least 10")
    held = {fit[n] for n in np.random.default_rng([settings["seed"], 4]).permutation(len(fit))[:count]}
    text = [sentence for sentence in sentences if sentence not in held]
    train = [s for s in fit if s not in held for _ in range(settings["sts_times"] if s in of_sts else 1)]
    digest = hashlib.sha256("\n".join(sentences).encode("utf-8", "surrogatepass")).hexdigest()
    record = {"name": path.name, "text": len(text), "train": len(train), "held_out": count, "sha256": digest,
              "sts": {part: pairs.name for part, pairs in sts.items()} if sts else None}
    return Corpus(text, train, [sentence for sentence in fit if sentence in held], sts, record, path.absolute())


def find_wiki(folder):
    """The path of the Wikipedia sentences under a folder, checked. Raises DataError, with what to put where."""
    path = find_file([WIKI.name, f"{WIKI.name}.gz"], folder)
    if path is None:
        raise DataError(f"{WIKI.name} (or .gz) is neither in {folder} nor one folder below: put it there, or give "
                        "--data FILE, any text with one sentence a line")
    check_content(path, WIKI)
    return path


def open_sts(settings, folder):
    """The STS Benchmark, None with --sts none."""
    given = settings["sts"]
    if given == "none":
        return None
    if given is not None and not Path(given).is_dir():
        raise UsageError(f"--sts {given}: there is no such folder; expected one with the STS Benchmark, or none")
    try:
        return find_sts(given or folder, settings["quiet"])
    except DataError as error:
        raise DataError(f"{error} (or train without it: --sts none)") from error


def describe(corpus, vocabulary):
    """Lines about the data."""
    ids = np.concatenate([vocabulary.encode(sentence) for sentence in corpus.text])
    rare = ((ids == UNK) | (ids >= len(vocabulary.words))).mean()
    where = f"in {vocabulary.buckets:,} buckets" if vocabulary.buckets else "unknown"
    lines = [f"{corpus.path}: {len(corpus.text):,} different sentences, {len(corpus.held_out)} more held out; an epoch "
             f"meets {len(corpus.train):,}; {len(vocabulary.words):,} words, {rare:.1%} of the text {where}"]
    if corpus.sts:
        lines.append(f"scored on {corpus.sts['dev'].name} (choosing the best checkpoint) and {corpus.sts['test'].name}")
    return "\n".join(lines)


# ---- training --------------------------------------------------------------------------------------------

def build_model(settings, vocabulary, corpus):
    """The untrained model; at first all words are as likely as they are in the text."""
    own = {key: settings[key] for key in ("heads", "layers", "length", "pooling", "norm", "activation", "dropout",
                                          "attention_dropout", "dtype")}
    model = TSDAE(vocabulary, settings["width"], tie=not settings["no_tie"],
                  rng=np.random.default_rng([settings["seed"], 1]), **own)
    words = np.concatenate([enclosed(vocabulary.encode(sentence)[:settings["length"] - 2])[1:]
                            for sentence in corpus.train])
    model.decoder.begin_with(np.bincount(words, minlength=len(vocabulary)).astype(settings["dtype"]))
    return model


class TrainingBatches(DenoisingBatches):
    """With a fifth array, the places of the predicted words: the host has them at once, a GPU would be waited for."""

    def __getitem__(self, step):
        batch = super().__getitem__(step)
        return (*batch, TSDAE.predicted_places(batch[3]))


def batches_of(corpus, vocabulary, settings):
    """The training batches; sentences longer than --length are cut."""
    return TrainingBatches([vocabulary.encode(sentence) for sentence in corpus.train], settings["batch_size"],
                           settings["seed"], noise=settings["noise"], ratio=settings["ratio"], vocab=len(vocabulary),
                           longest=settings["length"] - 2)


def optimizer_of(settings, model):
    """The optimizer; weight decay is for matrices that have a gradient."""
    unused = {id(parameter) for parameter in model.unused_parameters()}
    spared = [p for p in model.parameters() if p.value.ndim < 2 or id(p) in unused]
    return make_optimizer(settings, model.parameters(), no_decay=spared)


def forward_backward(model, batch, rng):
    """One training step's loss and gradients: the mean over the batch's words, [SEP] counted."""
    noisy, noisy_mask, clean, clean_mask, places = batch
    logits, cache = model.forward(noisy, clean, noisy_mask, clean_mask, rng, places)
    loss, loss_cache = softmax_cross_entropy.forward(logits, model.targets(clean, clean_mask, places))
    model.backward(softmax_cross_entropy.backward(1.0, loss_cache), cache)
    return loss


def with_noise(sentences, vocabulary, settings):
    """(noisy, clean), the words of each sentence, always with the same noise."""
    most, rng = settings["length"] - 2, np.random.default_rng([settings["seed"], 5])
    clean = [vocabulary.encode(sentence)[:most] for sentence in sentences]
    return [NOISES[settings["noise"]](ids, settings["ratio"], len(vocabulary), rng)[:most] for ids in clean], clean


def held_out_batches(corpus, vocabulary, settings):
    """[(noisy, noisy_mask, clean, clean_mask)] of the held-out sentences, those of like length together."""
    pairs = sorted(zip(*with_noise(corpus.held_out, vocabulary, settings)), key=lambda pair: len(pair[1]))
    noisy, clean = ([enclosed(ids) for ids in group] for group in zip(*pairs))
    return [(*padded(noisy[n:n + 64]), *padded(clean[n:n + 64])) for n in range(0, len(clean), 64)]


def rebuilding_losses(model, batches, device):
    """(loss, the same with each sentence's embedding given to another): what the decoder uses of the embedding."""
    totals, count = np.zeros(2), 0
    for batch in batches:
        noisy, noisy_mask, clean, clean_mask = to_device(batch, device)
        s, targets = model.encoder(noisy, noisy_mask), model.targets(clean, clean_mask)
        shifted = s[np.roll(np.arange(len(s)), 1).tolist()]
        for n, embedding in enumerate((s, shifted)):
            logits = model.decoder(clean[:, :-1], embedding, clean_mask[:, 1:])
            totals[n] += float(softmax_cross_entropy.forward(logits, targets)[0]) * len(targets)
        count += len(targets)
    return (totals / count).tolist()


def encode(model, sentences):
    """model.encode, silent about cutting: in an evaluation it is known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.encode(sentences).astype(np.float64)


def evaluation(corpus, vocabulary, settings, device):
    """f(model) -> the figures of an evaluation."""
    batches = held_out_batches(corpus, vocabulary, settings)

    def evaluate(model):
        figures = {}
        if corpus.sts:
            pairs = corpus.sts["dev"]
            n = len(pairs.scores)
            vectors = encode(model, pairs.first + pairs.second)
            first, second = vectors[:n], vectors[n:]
            rho, r = tsdae_score.correlations(tsdae_score.cosines(first, second), pairs.scores)
            same = pairs.scores >= tsdae_score.POSITIVE
            figures = {"dev_spearman": rho, "dev_pearson": r}
            if same.any():
                figures["alignment"] = tsdae_score.alignment(first[same], second[same])
            figures["uniformity"] = tsdae_score.uniformity(first)
        else:
            figures["uniformity"] = tsdae_score.uniformity(encode(model, corpus.held_out))
        loss, shuffled = rebuilding_losses(model, batches, device)
        return {**figures, "held_out_loss": loss, "held_out_loss_shuffled": shuffled}
    return evaluate


def train(settings, corpus, vocabulary, out, steps):
    """Train in the run's folder; writes result.json and the figures."""
    device = device_of(settings)
    model = build_model(settings, vocabulary, corpus).to_device(device)
    digest = hashlib.sha256("\n".join(vocabulary.words).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    # In this order: a checkpoint of another text is told by the text, not by thousands of words.
    dictionary = f"{len(vocabulary.words):,} words (sha256 {digest}...), {vocabulary.buckets:,} buckets"
    config = {**settings, "corpus": {key: corpus.record[key] for key in ("train", "sha256")}, "dictionary": dictionary,
              "model": model.record()}
    trainer = Trainer(
        model, optimizer_of(settings, model), batches_of(corpus, vocabulary, settings), forward_backward,
        evaluation(corpus, vocabulary, settings, device), out=out, config=config, seed=settings["seed"], device=device,
        best="dev_spearman" if corpus.sts else "held_out_loss", largest=bool(corpus.sts), log_every=LOG_EVERY,
        eval_every=settings["eval_every"], quiet=settings["quiet"], schedule=schedule_of(settings, steps),
        **clip_settings(settings))
    go_on(trainer, settings, "tsdae", steps)
    say(settings, f"{sum(p.value.size for p in model.parameters()):,} parameters, {steps:,} steps of "
                  f"{settings['batch_size']} sentences")
    try:
        trainer.train(steps)
    finally:
        if trainer.log.rows:
            tsdae_figures.of_run(settings, trainer.log, out)
    report(settings, trainer, corpus, vocabulary, out)


# ---- what came out ---------------------------------------------------------------------------------------

def scores_of(settings, model, corpus, vocabulary, device):
    """{name: {"dev": [Spearman, Pearson], "test": ...}}: of the model, then of what it has to beat."""
    asked = [s for part in ("dev", "test") for s in corpus.sts[part].first + corpus.sts[part].second]
    untrained = build_model(settings, vocabulary, corpus).to_device(device)
    fitted = [corpus.train[n] for n in np.random.default_rng([settings["seed"], 6]).permutation(
        len(corpus.train))[:tsdae_score.FITTED_ON]]
    E = asnumpy(model.encoder.words.embedding.W.value)
    embeds = {"TSDAE": lambda sentences: encode(model, sentences),
              "untrained encoder": lambda sentences: encode(untrained, sentences),
              "mean of the trained word embeddings": tsdae_score.mean_of_words(vocabulary, E),
              "mean of random word vectors": tsdae_score.random_words(vocabulary, settings["width"], settings["seed"]),
              "bag of words": tsdae_score.bag_of_words(asked)[0],
              "TF-IDF": tsdae_score.tf_idf(asked, corpus.text)}
    whitened = {f"{name}, whitened": tsdae_score.whitened(embed, fitted) for name, embed in list(embeds.items())[:4]}
    return {name: {part: list(tsdae_score.score(embed, corpus.sts[part])) for part in ("dev", "test")}
            for name, embed in {**embeds, **whitened}.items()}


def model_scores(model, corpus):
    """{"dev": [Spearman, Pearson], "test": ...} of a model as it is; None without the benchmark."""
    if corpus.sts:
        return {part: list(tsdae_score.score(lambda sentences: encode(model, sentences), corpus.sts[part]))
                for part in ("dev", "test")}
    return None


def report(settings, trainer, corpus, vocabulary, out):
    """Score the best checkpoint; keep that in result.json, print it, draw it."""
    model, path = trainer.model, out / "best.safetensors"
    last = model_scores(model, corpus)
    tensors = model_tensors(load_tensors(path)[0])
    fill_exactly(model.named_arrays(), tensors, path)
    device = device_of(settings)
    seconds = max(trainer.seconds, 1e-9)
    loss, shuffled = rebuilding_losses(model, held_out_batches(corpus, vocabulary, settings), device)
    result = {"steps": trainer.step, "best": trainer.best, "corpus": corpus.record, "seconds": round(seconds, 1),
              "parameters": sum(p.value.size for p in model.parameters()), "held_out_loss": loss,
              "held_out_loss_shuffled": shuffled, "last_loss": trainer.log.column("held_out_loss")[-1][1],
              "sentences_per_second": round(trainer.step * settings["batch_size"] / seconds),
              "clipped": clipped_share(trainer.log, settings), "rebuilt": rebuilt(settings, model, corpus, vocabulary)}
    if corpus.sts:
        result["scores"] = {**scores_of(settings, model, corpus, vocabulary, device), LAST: last}
        tsdae_figures.draw_scores(result["scores"], corpus.sts["test"].name, out)
    write_atomically(out / "result.json", f"{json.dumps(result, indent=1)}\n".encode())
    for noisy, sentence, written in result["rebuilt"]:
        say(settings, f"noisy    {noisy}\nsentence {sentence}\nrebuilt  {written}")
    if corpus.sts:
        print(table(result["scores"], corpus))
    print(f"best checkpoint: step {trainer.best['step']:,} of {trainer.step:,}; loss on held-out sentences {loss:.3f}, "
          f"{shuffled:.3f} with another sentence's embedding; {seconds:.0f} s", flush=True)


def clipped_share(log, settings):
    """The share of the log's rows whose gradient norm was above --clip-norm (None: no clipping)."""
    norms = [norm for _, norm in log.column("grad_norm")]
    if not settings["clip_norm"] or not norms:
        return None
    return round(sum(norm > settings["clip_norm"] for norm in norms) / len(norms), 3)


def rebuilt(settings, model, corpus, vocabulary):
    """[(noisy, sentence, rebuilt)] of the first held-out sentences."""
    noisy, clean = with_noise(corpus.held_out[:SHOWN], vocabulary, settings)
    s = model.encoder(*to_device(padded([enclosed(ids) for ids in noisy]), device_of(settings)))
    written = model.reconstruct(s)
    return [(vocabulary.decode(a), vocabulary.decode(b), c) for a, b, c in zip(noisy, clean, written)]


def table(scores, corpus):
    """The scores as lines, the best on test first."""
    lines = [f"{'Spearman (Pearson)':40}{corpus.sts['dev'].name:>32}{corpus.sts['test'].name:>40}"]
    for name, own in sorted(scores.items(), key=lambda item: -item[1]["test"][0]):
        cells = ["{:.3f} ({:.3f})".format(*own[part]) for part in ("dev", "test")]
        lines.append(f"{name:40}{cells[0]:>32}{cells[1]:>40}")
    return "\n".join(lines)


# ---- using the encoder -----------------------------------------------------------------------------------

def read_lines(path):
    """[str]: every line of a file, so that row n is line n. Raises DataError for an empty one, naming it."""
    lines = []
    for n, line in enumerate(read_unpacked(path).removesuffix(b"\n").split(b"\n"), 1):
        try:
            lines.append(line.decode("utf-8-sig" if n == 1 else "utf-8").strip())
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, line {n}: not UTF-8") from error
        if not lines[-1]:
            raise DataError(f"{path}, line {n}: empty; expected a sentence on every line, for each gets a vector")
    return lines


def use_encoder(settings):
    """--encode: write the vectors of a file's lines, print those nearest to a sentence."""
    device, out = device_of(settings), settings["out"]
    if out is not None and Path(out).exists():
        raise UsageError(f"--out {out} is there already; nothing was written")
    if out is not None and not Path(out).absolute().parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {Path(out).parent}")
    query = settings.get("nearest")
    if query is not None and not query.strip():
        raise UsageError(f"--nearest is {query!r}; expected a sentence")
    lines = read_lines(settings["encode"])
    model = TSDAE.load(settings["checkpoint"], device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        vectors = model.encode(lines)
        of_query = None if query is None else model.encode([query])
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        print(f"warning: {text}", file=sys.stderr)
    if out is not None:
        content = io.BytesIO()
        np.save(content, vectors)
        write_atomically(out, content.getvalue())
        say(settings, f"{out}: {vectors.shape[0]:,} x {vectors.shape[1]} float32, row n the n-th line of "
                      f"{settings['encode']}")
    if query is not None:
        similarity = tsdae_score.cosines(vectors, of_query)
        for n in np.argsort(-similarity, kind="stable")[:settings.get("top") or 10]:
            print(f"{similarity[n]:.3f}  {lines[n]}")


# ---- the command -----------------------------------------------------------------------------------------

def main(argv):
    settings = parse(argv)
    if settings.get("encode"):
        try:
            use_encoder(settings)
        except BrokenPipeError:                     # the reader has enough: `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    device_of(settings)                             # before anything is written
    corpus = open_corpus(settings)
    settings["data"] = str(Path(settings["data"]).absolute()) if settings["data"] else str(data_folder().absolute())
    if settings["sts"] not in (None, "none"):
        settings["sts"] = str(Path(settings["sts"]).absolute())
    if settings["ablate"] is not None:
        tsdae_ablate.run_grid(settings, DEFAULTS)
        return
    try:                                            # nor is anything written for settings that do not fit
        vocabulary = WordVocabulary.of(corpus.text, settings["vocab"], settings["buckets"])
        batches = batches_of(corpus, vocabulary, settings)
        steps = steps_of(settings, batches.per_epoch, STEPS)
        schedule_of(settings, steps)
        optimizer_of(settings, build_model(settings, vocabulary, corpus))
    except ValueError as error:
        raise UsageError(str(error)) from error
    say(settings, describe(corpus, vocabulary))
    out, hold = open_run_folder("tsdae", settings)
    say(settings, f"writing to {out}")
    train(settings, corpus, vocabulary, out, steps)
    del hold
    say(settings, f"figures: {', '.join(str(path) for path in sorted(out.glob('*.png')))}")


if __name__ == "__main__":
    sys.exit(run(main))
