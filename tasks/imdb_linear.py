"""Linear classifiers of IMDB reviews, to compare the recurrent ones of tasks/imdb.py with.

    python tasks/imdb_linear.py bow                      a bag of words, seconds
    python tasks/imdb_linear.py lsa                      latent semantic analysis, a minute

bow     logits = x W + b, x the review's row of TF-IDF: of each known word log(1 + how often it stands there) times
        (log((1 + n) / (1 + how many of the n training reviews have it)) + 1), the row's norm 1
lsa     the same of the row's 300 coordinates in the space of the largest singular vectors of the training rows (latent
        semantic analysis; Deerwester et al. 1990), standardised

The number of epochs is the one that is best for a tenth of the training reviews, unless --epochs says it. The rows are
sparse (scipy.sparse), loss and optimizer our own. Wang 2017, Table 2 has both from other papers: bag of
words 12.20 (bnc) and 11.77 % error, LSA 16.04 (this one from memory, its source was not found again).

Expect: a test error of 11.0 % (bow) and 12.2 % (lsa); a run folder (runs/imdb/TIME) with config.json, log.csv and
result.json.
"""

import sys
import time

import numpy as np
from scipy.sparse import csr_array, diags_array
from scipy.sparse.linalg import svds

from minigrad.data.batches import Batches
from minigrad.losses import softmax_cross_entropy
from minigrad.optim import AdamW
from minigrad.parameter import Parameter
from minigrad.training import RunLog
from tasks import frame, imdb
from tasks.frame import UsageError, number, whole
from tasks.frame.flags import SHARED_DEFAULTS, given_on
from tasks.frame.run_folder import open_run_folder, write_json

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


# ---- the command -----------------------------------------------------------------------------------------

DEFAULTS = {**SHARED_DEFAULTS, "data": None, "lr": None, "vocab": 10_000, "train_size": 0, "test_size": 0}


def parser():
    parser = frame.OneLineParser("python tasks/imdb_linear.py", __doc__)
    parser.add_argument("model", choices=MODELS, help="bow or lsa")
    parser.add_argument("--data", metavar="PATH", help=imdb.READS)
    parser.add_argument("--seed", type=whole(0), help="default 0")
    parser.add_argument("--epochs", type=number(0, open_low=True), help="passes over the training reviews")
    parser.add_argument("--lr", type=number(0), help=f"learning rate (default: bow {LR['bow']}, lsa {LR['lsa']})")
    parser.add_argument("--vocab", type=whole(1), help="most frequent words that are known (default 10,000)")
    parser.add_argument("--train-size", type=whole(0), help="reviews to train on, at random; 0: all (default)")
    parser.add_argument("--test-size", type=whole(0), help="reviews to test on, at random; 0: all (default)")
    parser.add_argument("--threads", type=whole(1), help="BLAS threads (default 1)")
    parser.add_argument("--out", help="run folder (default runs/imdb/TIME); a non-empty one is refused")
    parser.add_argument("--quiet", action="store_true", default=None, help="print results and errors only")
    return parser


def main(argv):
    """Train one of them and keep what came out in the run's folder."""
    settings = {**DEFAULTS, **given_on(parser(), argv)}
    with frame.blas_threads(settings["threads"]):
        data = imdb.open_reviews(settings)
        if len(data.train.labels) < 2:
            raise UsageError(f"--train-size is {len(data.train.labels)}; expected at least 2")
        out, hold = open_run_folder("imdb", settings)
        train(settings, data.train, data.test, out)
        del hold


def train(settings, train, test, out):
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
    write_json(out / "result.json", result)
    why = "" if settings["epochs"] else " (as many as were best for a tenth of the training reviews)"
    frame.tell(f"{name}: test error {errors[-1]:.2%} after {epochs} epochs{why}, training error "
          f"{result['train_error']:.2%}; {result['seconds']:.0f} s")


TASK = imdb.TASK                                    # its kept runs are shown together with those

if __name__ == "__main__":
    sys.exit(frame.exit_status(main))
