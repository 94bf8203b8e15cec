"""The data of tasks/tsdae.py: the training text, what is held out of it, and the STS Benchmark."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minigrad.data import DataError, data_folder
from minigrad.data.files import Official, check_content, find_file
from minigrad.data.sentences import NOISES, UNK, WordVocabulary, enclosed, padded, read_sentences, words_of
from minigrad.data.sts import find_sts
from tasks.frame import UsageError

WIKI = Official("wikisplit_sentences.txt", "", 5_659_299,
                "sha256:59b9de4dbb70f4d3035644eaf3ca2cccfd1421dd2466cbb1fb6095e947cbb1d3")
HELD_OUT = 256                                      # sentences that are not trained on


class Corpus(NamedTuple):
    """The training text, what is held out of it, and the STS Benchmark."""

    text: list                  # [str] different sentences
    train: list                 # [str] those to train on: not too long, the benchmark's several times
    held_out: list              # [str] in neither
    sts: dict | None            # {"train", "dev", "test": Pairs}
    record: dict                # what is kept of it with a result
    path: Path
    vocabulary: WordVocabulary


def open_corpus(settings):
    """The text and the benchmark that the settings name. Raises DataError or UsageError where there is none."""
    given = settings["data"]
    if given is not None and not Path(given).exists():
        raise UsageError(f"--data {given}: there is no such file or folder")
    folder = data_folder(given)
    path = folder if folder.is_file() else find_wiki(folder)
    sentences, sts = read_sentences(path), open_sts(settings, data_folder() if folder.is_file() else folder)
    of_sts = set() if not sts or settings["no_sts_text"] else {*sts["train"].first, *sts["train"].second}
    if settings["sts"] not in (None, "none"):
        settings["sts"] = str(Path(settings["sts"]).absolute())  # so that --resume finds it from any folder
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
    return Corpus(text, train, [sentence for sentence in fit if sentence in held], sts, record, path.absolute(),
                  WordVocabulary.of(text, settings["vocab"], settings["buckets"]))


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


def describe(settings, corpus):
    """Lines about the data."""
    vocabulary = corpus.vocabulary
    ids = np.concatenate([vocabulary.encode(sentence) for sentence in corpus.text])
    rare = ((ids == UNK) | (ids >= len(vocabulary.words))).mean()
    where = f"in {vocabulary.buckets:,} buckets" if vocabulary.buckets else "unknown"
    lines = [f"{corpus.path}: {len(corpus.text):,} different sentences, {len(corpus.held_out)} more held out; an epoch "
             f"meets {len(corpus.train):,}; {len(vocabulary.words):,} words, {rare:.1%} of the text {where}"]
    if corpus.sts:
        lines.append(f"scored on {corpus.sts['dev'].name} (choosing the best checkpoint) and {corpus.sts['test'].name}")
    return "\n".join(lines)


def with_noise(settings, vocabulary, sentences):
    """(noisy, clean), the words of each sentence, always with the same noise."""
    most, rng = settings["length"] - 2, np.random.default_rng([settings["seed"], 5])
    clean = [vocabulary.encode(sentence)[:most] for sentence in sentences]
    return [NOISES[settings["noise"]](ids, settings["ratio"], len(vocabulary), rng)[:most] for ids in clean], clean


def held_out_batches(settings, corpus):
    """[(noisy, noisy_mask, clean, clean_mask)] of the held-out sentences, those of like length together."""
    pairs = sorted(zip(*with_noise(settings, corpus.vocabulary, corpus.held_out)), key=lambda pair: len(pair[1]))
    noisy, clean = ([enclosed(ids) for ids in group] for group in zip(*pairs))
    return [(*padded(noisy[n:n + 64]), *padded(clean[n:n + 64])) for n in range(0, len(clean), 64)]
