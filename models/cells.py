"""The recurrent layers that the tasks compare, by name: RRA, and the models of Wang 2017, Table 1."""

from minigrad import layers
from minigrad.check import check_choice
from minigrad.initializers import generator

# {name: (label, make(d, h, own, common))}; own: the settings of SETTINGS, common: rng and dtype. RRA and the LSTM; the
# plain network and its two steps towards RRA (the paper's equations 3 to 5); the rest of its Table 1; SRU.
TABLE = {
    "rra": ("RRA, K = {window}", lambda d, h, own, common: layers.RRALSTM(
        d, h, own["window"], offset=own["offset"], normalize=own["normalize"], forget_bias=own["forget_bias"],
        init=own["init"], **common)),
    "lstm": ("LSTM", lambda d, h, own, common: layers.LSTM(
        d, h, forget_bias=own["forget_bias"], init=own["init"], **common)),
    "rnn": ("RNN", lambda d, h, own, common: layers.RNN(d, h, **common)),
    "rnn-residual": ("residual RNN, k = {window}", lambda d, h, own, common: layers.RNN(
        d, h, residual=own["window"], **common)),
    "rnn-attention": ("attention RNN, k = {window}", lambda d, h, own, common: layers.RNN(
        d, h, residual=own["window"], attention=True, **common)),
    "irnn": ("IRNN", lambda d, h, own, common: layers.IRNN(d, h, **common)),
    "urnn": ("uRNN", lambda d, h, own, common: layers.URNN(d, h, **common)),
    "rwa": ("RWA", lambda d, h, own, common: layers.RWA(d, h, **common)),
    "sru": ("SRU", lambda d, h, own, common: layers.SRU(d, h, **common))}
CELLS = tuple(TABLE)
BOTH_WAYS = tuple(f"bi{name}" for name in CELLS)
SETTINGS = {"window": 10, "offset": 2, "normalize": "sum", "forget_bias": 1.0, "init": "orthogonal"}
# {setting: the cells that it applies to}
TAKEN_BY = {"window": ("rra", "rnn-residual", "rnn-attention"), "offset": ("rra",), "normalize": ("rra",),
            "forget_bias": ("rra", "lstm"), "init": ("rra", "lstm")}


def build_cell(name, d, h, *, rng=None, dtype=None, **own):
    """(layer, width): the recurrent layer `name` that maps (B, L, d) to (B, L, width), h units.

    name         one of CELLS, or of BOTH_WAYS: two of them, one reading backwards (Bidirectional), 2h wide
    window       K, the states that rra attends to; k of rnn-residual's shortcut from h_{t-k}, and of rnn-attention's
                 weights over h_{t-2} ... h_{t-k}
    forget_bias  of rra and lstm, as is init; offset, normalize: of rra. SETTINGS has the defaults

    The width is h; for urnn 2h: [Re h, Im h]. Raises ValueError for another name or a setting that the layer rejects,
    TypeError for an unknown setting.
    """
    check_choice("build_cell", "name", name, CELLS + BOTH_WAYS)
    unknown = sorted(set(own) - set(SETTINGS))
    if unknown:
        raise TypeError(f"build_cell: {unknown[0]} is unknown; expected some of {', '.join(SETTINGS)}")
    own, common = {**SETTINGS, **own}, {"rng": generator(rng), "dtype": dtype}
    _, make = TABLE[name.removeprefix("bi") if name in BOTH_WAYS else name]
    width = 2 * h if name.endswith("urnn") else h
    if name in BOTH_WAYS:
        one, other = (make(d, h, own, common) for _ in range(2))
        return layers.Bidirectional(one, other), 2 * width
    return make(d, h, own, common), width


def label(name, window):
    """A model's name in figures and tables: "RRA, K = 10", "LSTM", "bidirectional RRA, K = 5"."""
    if name in BOTH_WAYS:
        return f"bidirectional {label(name.removeprefix('bi'), window)}"
    return TABLE[name][0].format(window=window)


def taken_by(names):
    """TAKEN_BY for `names`, some of CELLS and BOTH_WAYS: a setting of rra is one of birra too."""
    return {key: tuple(name for name in names if name.removeprefix("bi") in cells) for key, cells in TAKEN_BY.items()}
