"""How sentence embeddings are scored: correlation of cosines with gold scores, and what they are compared with."""

import math
from collections import Counter

import numpy as np
from scipy.sparse import csr_array
from scipy.stats import pearsonr, spearmanr

from minigrad.backend import to_device
from minigrad.data.sentences import words_of
from minigrad.losses import softmax_cross_entropy

FITTED_ON = 5000                # training sentences that whitening and uniformity look at, at most
POSITIVE = 4.0                  # a pair with this gold score or a higher one says the same (alignment)


def normalized(vectors):
    """Each row divided by its length; a row of zeros stays so."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(norms == 0, 1, norms)


def cosines(first, second):
    """(n,) the cosine of each row of `first` with the same row of `second`, dense or sparse; 0 for a zero row."""
    products = (first * second).sum(axis=1)
    norms = [np.sqrt((vectors * vectors).sum(axis=1)) for vectors in (first, second)]
    scale = norms[0] * norms[1]
    return products / np.where(scale == 0, 1, scale)


def correlations(similarity, gold):
    """(Spearman's rho, Pearson's r). Where all similarities are equal neither is defined: 0."""
    if np.ptp(similarity) == 0 or np.ptp(gold) == 0:
        return 0.0, 0.0
    return float(spearmanr(similarity, gold).statistic), float(pearsonr(similarity, gold).statistic)


def score(embed, pairs):
    """(Spearman, Pearson) of the cosines of embed([sentence]) -> (n, ...) with the gold scores of Pairs."""
    n = len(pairs.scores)
    vectors = embed([*pairs.first, *pairs.second])
    return correlations(cosines(vectors[:n], vectors[n:]), pairs.scores)


def both(embed, sts):
    """{"dev": [Spearman, Pearson], "test": ...}; None without the benchmark."""
    return {part: list(score(embed, sts[part])) for part in ("dev", "test")} if sts else None


def figures_of(embed, pairs):
    """What an evaluation says of a model: dev_spearman, dev_pearson, alignment (if pairs say the same), uniformity."""
    n = len(pairs.scores)
    vectors = embed(pairs.first + pairs.second)
    first, second = vectors[:n], vectors[n:]
    rho, r = correlations(cosines(first, second), pairs.scores)
    same = pairs.scores >= POSITIVE
    figures = {"dev_spearman": rho, "dev_pearson": r}
    if same.any():
        figures["alignment"] = alignment(first[same], second[same])
    return {**figures, "uniformity": uniformity(first)}


def alignment(first, second):
    """E |f(x) - f(y)|^2 over pairs that say the same, f of length 1; small is good (Wang and Isola 2020, 4.1)."""
    return float(((normalized(first) - normalized(second))**2).sum(axis=1).mean())


def uniformity(vectors):
    """log E exp(-2 |f(x) - f(y)|^2) over all pairs of different sentences, f of length 1: low is good (ibid.).

    0 where all embeddings are the same; -4 where they are spread over a sphere of many dimensions.
    """
    f = normalized(np.asarray(vectors, np.float64))
    squares = np.maximum(2 - 2 * (f @ f.T), 0)
    n = len(f)
    return math.log(max((np.exp(-2 * squares).sum() - n) / (n * (n - 1)), 1e-300))


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


# ---- whitening -------------------------------------------------------------------------------------------

def whitening(vectors):
    """f(vectors) that makes the mean of the given ones 0 and their covariance 1, by their principal components.

    No score is looked at. Directions in which they do not vary are left out.
    """
    mean = vectors.mean(axis=0)
    _, spread, directions = np.linalg.svd(np.asarray(vectors - mean, np.float64), full_matrices=False)
    varies = spread > 1e-6 * spread.max(initial=0)
    W = directions[varies].T * (math.sqrt(len(vectors)) / spread[varies])
    return lambda rows: (rows - mean) @ W


def whitened(embed, sentences):
    """The embed that whitens by what `embed` makes of the given sentences."""
    white = whitening(embed(sentences))
    return lambda asked: white(embed(asked))


# ---- what a model has to beat ----------------------------------------------------------------------------

def bag_of_words(sentences):
    """embed of a sentence as the number of times that each word comes; `sentences` is all that will be asked for."""
    ids = {word: n for n, word in enumerate(sorted({word for s in sentences for word in words_of(s)}))}

    def embed(sentences):
        counts = [Counter(words_of(s)) for s in sentences]
        rows = np.repeat(np.arange(len(counts)), [len(count) for count in counts])
        columns = [ids[word] for count in counts for word in count]
        values = np.array([n for count in counts for n in count.values()], np.float64)
        return csr_array((values, (rows, columns)), shape=(len(counts), len(ids)))
    return embed, ids


def tf_idf(sentences, text):
    """`bag_of_words`, each word times ln((1 + n) / (1 + df)) + 1: df of the n sentences of the text have it."""
    bag, ids = bag_of_words(sentences)
    frequency = Counter(word for sentence in text for word in set(words_of(sentence)))
    idf = np.array([math.log((1 + len(text)) / (1 + frequency[word])) + 1 for word in ids])
    return lambda sentences: bag(sentences).multiply(idf[None]).tocsr()      # SciPy 1.15 gives it as a coo_array


def mean_of_words(vocabulary, E):
    """embed of a sentence as the mean of its words' rows of E."""
    return lambda sentences: np.stack([E[vocabulary.encode(s)].mean(axis=0) for s in sentences]).astype(np.float64)


def random_words(vocabulary, d, seed):
    """`mean_of_words` with N(0, 1) rows."""
    return mean_of_words(vocabulary, np.random.default_rng(seed).standard_normal((len(vocabulary), d)))


# ---- all of them -----------------------------------------------------------------------------------------

def all_scores(trained, untrained, E, corpus, settings):
    """{name: {"dev": [Spearman, Pearson], "test": ...}}: of the model, then of what it has to beat.

    trained, untrained    embed of the model and of the same before training
    E                     the trained word embeddings
    """
    vocabulary, sts = corpus.vocabulary, corpus.sts
    asked = [s for part in ("dev", "test") for s in sts[part].first + sts[part].second]
    fitted = [corpus.train[n] for n in np.random.default_rng([settings["seed"], 6]).permutation(
        len(corpus.train))[:FITTED_ON]]
    embeds = {"TSDAE": trained, "untrained encoder": untrained,
              "mean of the trained word embeddings": mean_of_words(vocabulary, E),
              "mean of random word vectors": random_words(vocabulary, settings["width"], settings["seed"]),
              "bag of words": bag_of_words(asked)[0], "TF-IDF": tf_idf(asked, corpus.text)}
    white = {f"{name}, whitened": whitened(embed, fitted) for name, embed in list(embeds.items())[:4]}
    return {name: both(embed, sts) for name, embed in {**embeds, **white}.items()}


def table(scores, sts):
    """The scores as lines, the best on test first."""
    lines = [f"{'Spearman (Pearson)':40}{sts['dev'].name:>32}{sts['test'].name:>40}"]
    for name, own in sorted(scores.items(), key=lambda item: -item[1]["test"][0]):
        cells = ["{:.3f} ({:.3f})".format(*own[part]) for part in ("dev", "test")]
        lines.append(f"{name:40}{cells[0]:>32}{cells[1]:>40}")
    return "\n".join(lines)
