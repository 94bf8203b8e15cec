"""The flags of the tasks that compare recurrent layers (models/cells.py)."""

from minigrad.initializers import GATE_BLOCKS
from models.cells import SETTINGS, TAKEN_BY, label
from tasks.frame.flags import number, whole


def add_cell_flags(group, defaults):
    """--window, --offset, --normalize, --hidden, --forget-bias, --init."""
    of = {key: ", ".join(names) for key, names in TAKEN_BY.items()}
    group.add_argument("-K", "--window", type=whole(0), help=f"{of['window']}: the K or k earlier states that a step "
                                                             f"reads (default {defaults['window']})")
    group.add_argument("--offset", type=int, choices=[1, 2], help="rra: 2, the paper (default), or 1, its code")
    group.add_argument("--normalize", choices=["sum", "softmax"], help="rra: of the attention weights (default sum)")
    group.add_argument("--hidden", type=whole(1), help=f"units, of urnn complex ones (default {defaults['hidden']})")
    group.add_argument("--forget-bias", type=number(), help=f"{of['forget_bias']}: first value (default 1; --paper: 0)")
    group.add_argument("--init", choices=list(GATE_BLOCKS), help=f"{of['init']}: first W and U (default orthogonal)")


def cell_settings(settings):
    """Keywords of `build_cell`."""
    return {key: settings[key] for key in (*SETTINGS, "dtype")}


def cell_label(settings):
    """The model's name in figures: "RRA, K = 10"."""
    return label(settings["model"], settings["window"])
