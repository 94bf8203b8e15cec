"""Linear classifiers of IMDB reviews, beside the recurrent ones: tasks/imdb.py --model bow, --model lsa.

bow     logits = x W + b, x the review's row of TF-IDF: of each known word log(1 + how often it stands there) times
        (log((1 + n) / (1 + how many of the n training reviews have it)) + 1), the row's norm 1
lsa     the same of the row's 300 coordinates in the space of the largest singular vectors of the training rows (latent
        semantic analysis; Deerwester et al. 1990), standardised

The rows are sparse (scipy.sparse), loss and optimizer our own. Wang 2017, Table 2 has both from other papers: bag of
words 12.20 (bnc) and 11.77 % error, LSA 16.04 (this one from memory, its source was not found again).
"""

import json
import time

import numpy as np
from scipy.sparse import csr_array, diags_array
from scipy.sparse.linalg import svds

from minigrad.data.batches import Batches
from minigrad.losses import softmax_cross_entropy
from minigrad.optim import AdamW
from minigrad.parameter import Parameter
from minigrad.tensors import write_atomically
from minigrad.training.runlog import RunLog
from tasks.frame.common import tell
from tasks.frame.run_folder import UsageError, open_run_folder

MODELS = ("bow", "lsa")
COMPONENTS = 300
EPOCHS, BATCH, WEIGHT_DECAY = 10, 100, 0.01
LR = {"bow": 0.01, "lsa": 0.001}


def counts_of(reviews, vocab):
    """(n, vocab) sparse: how often each word stands in each review; the unknown ones are not counted."""
    rows = np.repeat(np.arange(len(reviews.labels)), np.diff(reviews.offsets))
    known = reviews.tokens > 1
    shape = (len(reviews.labels), vocab)
    return csr_array((np.ones(known.sum()), (rows[known], reviews.tokens[known].astype(np.int64))), shape=shape)


def tf_idf(train, test, vocab):
    """(training rows, test rows), sparse, each of norm 1, one a review; the idf is the training set's."""
    counts = counts_of(train, vocab)
    n_with = np.bincount(counts.indices, minlength=vocab)
    idf = np.log((1 + len(train.labels)) / (1 + n_with)) + 1
    return tuple(_weighed(part, idf) for part in (counts, counts_of(test, vocab)))


def _weighed(counts, idf):
    rows = counts.copy()
    rows.data = np.log1p(rows.data)
    rows = csr_array(rows @ diags_array(idf))
    norms = np.sqrt(rows.multiply(rows).sum(axis=1))
    return csr_array(diags_array(1 / np.maximum(np.asarray(norms).ravel(), 1e-12)) @ rows)


def lsa(train_rows, test_rows, components, seed):
    """(train, test), (n, components): rows in the space of the training rows' largest singular vectors, scaled."""
    start = np.random.default_rng(seed).standard_normal(min(train_rows.shape))
    _, _, V_T = svds(train_rows, k=min(components, min(train_rows.shape) - 1), v0=start)
    train, test = train_rows @ V_T.T, test_rows @ V_T.T
    mean, deviation = train.mean(axis=0), np.maximum(train.std(axis=0), 1e-12)
    return (train - mean) / deviation, (test - mean) / deviation


def train_linear(rows, labels, seed, *, lr, epochs, batch_size=BATCH, weight_decay=WEIGHT_DECAY, each=None):
    """(W (d, 2), b (2,)) of softmax(rows W + b) by AdamW; rows (n, d), sparse or not; each(epoch, W, b) after an epoch.

    Backward: dW = rows^T dlogits, db = the sum of dlogits over the batch. Raises ArithmeticError for NaN or Inf.
    """
    W, b = Parameter(np.zeros((rows.shape[1], 2)), "W"), Parameter(np.zeros(2), "b")
    optimizer = AdamW([W, b], lr=lr, weight_decay=weight_decay, no_decay=[b])
    batches = Batches((np.arange(len(labels)), labels), min(batch_size, len(labels)), seed=seed)
    for step in range(epochs * batches.per_epoch):
        chosen, of_them = batches[step]
        x = rows[chosen]
        _, cache = softmax_cross_entropy.forward(x @ W.value + b.value, of_them)
        dlogits = softmax_cross_entropy.backward(1.0, cache)
        W.grad[...], b.grad[...] = x.T @ dlogits, dlogits.sum(axis=0)
        with np.errstate(all="ignore"):                          # looked for here
            optimizer.step()
        if not (np.isfinite(W.value).all() and np.isfinite(b.value).all()):
            raise ArithmeticError(f"step {step + 1}: W or b is not finite; try a smaller --lr")
        if each and (step + 1) % batches.per_epoch == 0:
            each((step + 1) // batches.per_epoch, W.value, b.value)
    return W.value, b.value


def error(rows, labels, W, b):
    """The share of rows that are classified wrongly."""
    return float(((rows @ W + b).argmax(axis=1) != labels).mean())


def best_epochs(rows, labels, seed, **settings):
    """After how many of EPOCHS epochs the error is smallest on a tenth of the rows, trained on the others."""
    order = np.random.default_rng([seed, 13]).permutation(len(labels))
    held, rest = order[:max(len(order) // 10, 1)], order[max(len(order) // 10, 1):]
    errors = []
    train_linear(rows[rest], labels[rest], seed, epochs=EPOCHS, **settings,
                 each=lambda epoch, W, b: errors.append(error(rows[held], labels[held], W, b)))
    return int(np.argmin(errors)) + 1


def main(settings, train, test):
    """Train one of them and keep what came out in the run's folder."""
    if len(train.labels) < 2:
        raise UsageError(f"--train-size is {len(train.labels)}; expected at least 2 with --model {settings['model']}")
    out, hold = open_run_folder("imdb", settings)
    began, name = time.monotonic(), settings["model"]
    rows, test_rows = tf_idf(train, test, settings["vocab"] + 2)
    if name == "lsa":
        rows, test_rows = lsa(rows, test_rows, COMPONENTS, settings["seed"])
    lr = LR[name] if settings["lr"] is None else settings["lr"]
    epochs = max(1, round(settings["epochs"])) if settings["epochs"] else best_epochs(
        rows, train.labels, settings["seed"], lr=lr)
    log, per_epoch = RunLog(out / "log.csv"), len(train.labels) // min(BATCH, len(train.labels))
    log.start(["step", "seconds", "test_error", "test_error_all"])

    def each(epoch, W, b):
        of_test = error(test_rows, test.labels, W, b)
        log.append({"step": epoch * per_epoch, "seconds": round(time.monotonic() - began, 1),
                    "test_error": of_test, "test_error_all": of_test})

    W, b = train_linear(rows, train.labels, settings["seed"], epochs=epochs, lr=lr, each=each)
    errors = [value for _, value in log.column("test_error")]
    result = {"model": name, "steps": epochs * per_epoch, "epochs": epochs, "test_error": errors[-1],
              "train_error": error(rows, train.labels, W, b), "per_epoch": list(enumerate(errors, 1)),
              "parameters": W.size + b.size, "seconds": round(time.monotonic() - began, 1),
              "data": {"train": len(train.labels), "test": len(test.labels), "part": len(test.labels),
                       "features": rows.shape[1]}}
    write_atomically(out / "result.json", f"{json.dumps(result, indent=1)}\n".encode())
    why = "" if settings["epochs"] else " (as many as were best for a tenth of the training reviews)"
    tell(f"{name}: test error {errors[-1]:.2%} after {epochs} epochs{why}, training error "
          f"{result['train_error']:.2%}; {result['seconds']:.0f} s")
    del hold
