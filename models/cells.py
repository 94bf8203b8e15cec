"""The recurrent layers that the tasks compare, by name: RRA, and the models of Wang 2017, Table 1."""

from minigrad import layers
from minigrad.check import check_choice
from minigrad.initializers import generator

# RRA and the LSTM; the plain network and its two steps towards RRA (the paper's equations 3 to 5); what else is in the
# paper's Table 1; SRU.
CELLS = ("rra", "lstm", "rnn", "rnn-residual", "rnn-attention", "irnn", "urnn", "rwa", "sru")
BOTH_WAYS = tuple(f"bi{name}" for name in CELLS)
LABELS = {"rra": "RRA", "lstm": "LSTM", "rnn": "RNN", "rnn-residual": "residual RNN", "rnn-attention": "attention RNN",
          "irnn": "IRNN", "urnn": "uRNN", "rwa": "RWA", "sru": "SRU"}


def build_cell(name, d, h, *, window=10, offset=2, normalize="sum", forget_bias=1.0, init="orthogonal", rng=None,
               dtype=None):
    """(layer, width): the recurrent layer `name` that maps (B, L, d) to (B, L, width), h units.

    name         one of CELLS, or of BOTH_WAYS: two of them, one reading backwards (Bidirectional), 2h wide
    window       K, the states that rra attends to; k of rnn-residual's shortcut from h_{t-k}, and of rnn-attention's
                 weights over h_{t-2} ... h_{t-k}
    forget_bias  of rra and lstm, with `init`; offset and normalize: of rra

    The width is h, of urnn 2h: [Re h, Im h]. Raises ValueError for another name, or for a setting that the layer
    rejects.
    """
    check_choice("build_cell", "name", name, CELLS + BOTH_WAYS)
    rng = generator(rng)
    if name in BOTH_WAYS:
        settings = {"window": window, "offset": offset, "normalize": normalize, "forget_bias": forget_bias,
                    "init": init, "rng": rng, "dtype": dtype}
        (one, width), (other, _) = (build_cell(name.removeprefix("bi"), d, h, **settings) for _ in range(2))
        return layers.Bidirectional(one, other), 2 * width
    common = {"rng": rng, "dtype": dtype}
    gated = {"forget_bias": forget_bias, "init": init, **common}
    build = {"rra": lambda: layers.RRALSTM(d, h, window, offset, normalize, **gated),
             "lstm": lambda: layers.LSTM(d, h, **gated),
             "rnn": lambda: layers.RNN(d, h, **common),
             "rnn-residual": lambda: layers.RNN(d, h, residual=window, **common),
             "rnn-attention": lambda: layers.RNN(d, h, residual=window, attention=True, **common),
             "irnn": lambda: layers.IRNN(d, h, **common),
             "urnn": lambda: layers.URNN(d, h, **common),
             "rwa": lambda: layers.RWA(d, h, **common),
             "sru": lambda: layers.SRU(d, h, **common)}
    return build[name](), 2 * h if name == "urnn" else h


def label(name, window):
    """A model's name in figures and tables: "RRA, K = 10", "LSTM", "bidirectional RRA, K = 5"."""
    one = name.removeprefix("bi") if name in BOTH_WAYS else name
    words = LABELS[one] + {"rra": f", K = {window}", "rnn-residual": f", k = {window}",
                           "rnn-attention": f", k = {window}"}.get(one, "")
    return words if one == name else f"bidirectional {words}"
