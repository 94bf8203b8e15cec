"""TSDAE sentence embeddings, trained from nothing and scored on the STS Benchmark (Wang et al. 2021, arXiv 2104.06979).

    python tasks/tsdae.py                               train, score on STS, compare with the baselines
    python tasks/tsdae.py --data FILE                   on any text, one sentence a line (plain, .gz, .zip)
    python tasks/tsdae.py --resume runs/tsdae/...       continue a run that was stopped
    python tasks/tsdae.py encode FILE --checkpoint runs/tsdae/... --out vectors.npy
                                                        the embedding of each line of a file, (n, d) float32
    python tasks/tsdae.py encode FILE --checkpoint runs/tsdae/... --nearest "A man plays a guitar."
                                                        the lines of a file that are nearest to a sentence
    python tasks/tsdae_ablate.py                        noise, ratio, pooling, tying: a table and a figure

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
(with the baselines), last and best checkpoints, result.json.
"""

import hashlib
import sys
import warnings

import numpy as np

from minigrad.backend import asnumpy, to_device
from minigrad.data.sentences import NOISES, DenoisingBatches, enclosed, padded
from minigrad.losses import softmax_cross_entropy
from minigrad.training import load_model
from models.tsdae import POOLINGS, TSDAE
from tasks import frame, tsdae_encode, tsdae_figures, tsdae_score
from tasks.frame import UsageError, make_optimizer, number, whole
from tasks.tsdae_data import describe, held_out_batches, open_corpus, with_noise

DEFAULTS = {
    "sts": None, "no_sts_text": False, "sts_times": 3, "longest": 18, "vocab": 6000, "buckets": 2000,
    "width": 128, "heads": 4, "layers": 2, "length": 26, "pooling": "cls", "no_tie": False, "norm": "pre",
    "activation": "gelu_tanh", "dropout": 0.0, "attention_dropout": 0.0, "noise": "delete", "ratio": 0.3,
    "batch_size": 64, "optimizer": "adamw", "lr": 4e-3, "eps": None, "weight_decay": 0.01, "schedule": "cosine",
    "warmup": None, "clip_norm": 1.0, "eval_every": 200, "steps": 2000}
LAST = "TSDAE at the last step"                     # the best one by dev can be the untrained, in a short run
LOG_EVERY = 20
SHOWN = 3                                           # held-out sentences that are rebuilt at the end


def flags(group):
    add = group.add_argument
    add("--sts", metavar="FOLDER", help="where the STS Benchmark is; none: train without it (default: "
                                                     "the data folder)")
    add("--no-sts-text", action="store_true", default=None,
                     help="leave the sentences of sts-train.csv out of the training text")
    add("--sts-times", type=whole(1), help="how often an epoch meets these (default 3)")
    add("--longest", type=whole(0), help="leave sentences of more words out of the training text; 0: none "
                                                      "(default 18)")
    add("--noise", choices=list(NOISES), help="default delete")
    add("--ratio", type=number(0), help="share of words that the noise touches: with delete, the share "
                                                     "that is deleted (default 0.3; the paper's is 0.6)")
    add("--pooling", choices=POOLINGS, help="the embedding: the output at [CLS], the mean or the maximum "
                                                         "over the sentence (default cls)")
    add("--no-tie", action="store_true", default=None, help="a decoder with weights of its own")
    add("--vocab", type=whole(6), help="ids: the most frequent words, then the buckets (default 6,000)")
    add("--buckets", type=whole(0), help="ids that rarer words share by their hash; 0: all are [UNK] "
                                                      "(default 2,000)")
    add("--width", type=whole(1), help=f"d (default {DEFAULTS['width']})")
    add("--heads", type=whole(1), help="default 4")
    add("--layers", type=whole(1), help="of encoder and decoder each (default 2)")
    add("--length", type=whole(3), help="words of a sentence at most, [CLS] and [SEP] counted (default "
                                                     f"{DEFAULTS['length']}); what lies beyond is cut off")
    add("--norm", choices=["pre", "post"], help="layer norm before each part or after (default pre)")
    add("--activation", choices=["relu", "gelu", "gelu_tanh"], help="default gelu_tanh")
    add("--dropout", type=number(0), help="default 0")
    add("--attention-dropout", type=number(0), help="of the self-attention's weights (default 0)")


def check(settings, given):
    if settings["ratio"] > 1:
        raise UsageError(f"--ratio is {settings['ratio']:g}; expected a share, 0 ... 1")
    if settings["width"] % settings["heads"]:
        raise UsageError(f"--heads is {settings['heads']}; expected a divisor of --width, {settings['width']}")


# ---- training --------------------------------------------------------------------------------------------

def build(settings, corpus):
    """The untrained model; at first all words are as likely as they are in the text."""
    own = {key: settings[key] for key in ("heads", "layers", "length", "pooling", "norm", "activation", "dropout",
                                          "attention_dropout", "dtype")}
    vocabulary = corpus.vocabulary
    model = TSDAE(vocabulary, settings["width"], tie=not settings["no_tie"],
                  rng=np.random.default_rng([settings["seed"], 1]), **own)
    words = np.concatenate([enclosed(vocabulary.encode(sentence)[:settings["length"] - 2])[1:]
                            for sentence in corpus.train])
    model.decoder.set_bias_from_counts(np.bincount(words, minlength=len(vocabulary)).astype(settings["dtype"]))
    return model


class TrainingBatches(DenoisingBatches):
    """With a fifth array, the places of the predicted words: the host has them at once, a GPU would be waited for."""

    def __getitem__(self, step):
        batch = super().__getitem__(step)
        return (*batch, TSDAE.predicted_places(batch[3]))


def batches(settings, corpus):
    """The training batches; sentences longer than --length are cut."""
    vocabulary = corpus.vocabulary
    return TrainingBatches([vocabulary.encode(sentence) for sentence in corpus.train], settings["batch_size"],
                           settings["seed"], noise=settings["noise"], ratio=settings["ratio"], vocab=len(vocabulary),
                           longest=settings["length"] - 2)


def optimizer(settings, model):
    """Weight decay is for matrices that have a gradient."""
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


def trainer(settings, corpus, model):
    vocabulary = corpus.vocabulary
    digest = hashlib.sha256("\n".join(vocabulary.words).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    # In this order: a checkpoint of another text is told by the text, not by thousands of words.
    dictionary = f"{len(vocabulary.words):,} words (sha256 {digest}...), {vocabulary.buckets:,} buckets"
    return {"log_every": LOG_EVERY, "config": {"corpus": {key: corpus.record[key] for key in ("train", "sha256")},
                                               "dictionary": dictionary, "model": model.record()}}


# ---- evaluation ------------------------------------------------------------------------------------------

def encode(model, sentences):
    """model.encode, silent about cutting: in an evaluation it is known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.encode(sentences).astype(np.float64)


def evaluation(settings, corpus, device):
    """f(model, step) -> the figures of an evaluation."""
    batches = held_out_batches(settings, corpus)

    def evaluate(model, step):
        if corpus.sts:
            figures = tsdae_score.figures_of(lambda sentences: encode(model, sentences), corpus.sts["dev"])
        else:
            figures = {"uniformity": tsdae_score.uniformity(encode(model, corpus.held_out))}
        loss, shuffled = tsdae_score.rebuilding_losses(model, batches, device)
        return {**figures, "held_out_loss": loss, "held_out_loss_shuffled": shuffled}
    return evaluate


# ---- what came out ---------------------------------------------------------------------------------------

def result(run):
    """The best checkpoint, scored; and the last one."""
    settings, corpus, trainer, model = run.settings, run.data, run.trainer, run.trainer.model
    trained = lambda sentences: encode(model, sentences)
    last = tsdae_score.both(trained, corpus.sts)
    load_model(model, trainer.out / "best.safetensors")
    loss, shuffled = tsdae_score.rebuilding_losses(model, held_out_batches(settings, corpus), run.device)
    found = {"corpus": corpus.record, "held_out_loss": loss, "held_out_loss_shuffled": shuffled,
             "last_loss": trainer.log.column("held_out_loss")[-1][1],
             "sentences_per_second": round(trainer.step * settings["batch_size"] / max(trainer.seconds, 1e-9)),
             "rebuilt": rebuilt(run)}
    if corpus.sts:
        untrained = build(settings, corpus).to_device(run.device)
        E = asnumpy(model.encoder.words.embedding.W.value)
        scores = tsdae_score.all_scores(trained, lambda sentences: encode(untrained, sentences), E, corpus, settings)
        found["scores"] = {**scores, LAST: last}
        tsdae_figures.draw_scores(found["scores"], corpus.sts["test"].name, trainer.out)
    return found


def rebuilt(run):
    """[(noisy, sentence, rebuilt)] of the first held-out sentences."""
    vocabulary, model = run.data.vocabulary, run.trainer.model
    noisy, clean = with_noise(run.settings, vocabulary, run.data.held_out[:SHOWN])
    s = model.encoder(*to_device(padded([enclosed(ids) for ids in noisy]), run.device))
    written = model.reconstruct(s)
    return [(vocabulary.decode(a), vocabulary.decode(b), c) for a, b, c in zip(noisy, clean, written)]


def summary(run, result):
    lines = [] if run.settings["quiet"] else [f"noisy    {noisy}\nsentence {sentence}\nrebuilt  {written}"
                                              for noisy, sentence, written in result["rebuilt"]]
    if run.data.sts:
        lines.append(tsdae_score.table(result["scores"], run.data.sts))
    best = result["best"]["step"]
    lines.append(f"best checkpoint: step {best:,} of {result['steps']:,}; loss on held-out sentences "
                 f"{result['held_out_loss']:.3f}, {result['held_out_loss_shuffled']:.3f} with another sentence's "
                 f"embedding; {run.trainer.seconds:.0f} s")
    return "\n".join(lines)


def curve(corpus):
    """What chooses `best`: Spearman on dev, without the benchmark the loss. The figures are tsdae_figures'."""
    if corpus is None or corpus.sts:
        return frame.Curve("dev_spearman", "STS dev, Spearman", tsdae_figures.title_of, None, maximize=True)
    return frame.Curve("held_out_loss", "loss on held-out sentences", tsdae_figures.title_of, None)


def score_cell(name, part):
    return lambda kept: f"{kept['result']['scores'][name][part][0]:.3f}"


TASK = frame.Task(
    name="tsdae", description=__doc__, defaults=DEFAULTS, flags=flags, check=check,
    reads="a text, one sentence a line, or a folder with the data (default $MINIGRAD_DATA, then ~/.cache/minigrad)",
    label=tsdae_figures.title_of, data=open_corpus, describe=describe, model=build, batches=batches,
    optimizer=optimizer, step=forward_backward, evaluation=evaluation, trainer=trainer, curve=curve,
    result=result, summary=summary,
    figures=lambda run: tsdae_figures.of_run(run.settings, run.trainer.log, run.trainer.out),
    shown=frame.Shown(in_label=("sts", "noise", "ratio", "pooling", "no_tie"), columns={
        "dev": score_cell("TSDAE", "dev"), "test": score_cell("TSDAE", "test"),
        "test, whitened": score_cell("TSDAE, whitened", "test"),
        "test, untrained": score_cell("untrained encoder", "test"),
        "held-out loss": lambda kept: f"{kept['result']['held_out_loss']:.2f}",
        "steps": lambda kept: f"{kept['result']['steps']:,}"}, note="Spearman of the best checkpoint by dev"),
    commands={"encode": tsdae_encode.COMMAND})

if __name__ == "__main__":
    sys.exit(frame.run(TASK))
