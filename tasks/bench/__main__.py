"""How fast the layers and the models are: minigrad compared with PyTorch and JAX.

    python tasks/bench                        the tables of docs/results, some minutes on 2 cores
    python tasks/bench --json bench.json --out bench.png
    python tasks/bench --quick                small sizes, some seconds: does everything run and agree?
    python tasks/bench --only srupp           some of rra, lstm, rnns, srupp, tsdae, imdb
    python tasks/bench --rows-only            the comparison alone, without the tables of cost
    python tasks/bench -S 400 --hidden 256    another size (targets apply to the default size only)
    python tasks/bench --device gpu --json bench.json --out bench.png --seconds 240       on a GPU: see below

A row is forward + backward in float32, with the gradients of x and of all parameters, all sides in one process: RRALSTM
compared with the same equations in PyTorch eager and in jax.jit(lax.scan), LSTM with torch.nn.LSTM; IRNN, RWA and URNN
("rnns") with their equations in PyTorch eager, IRNN with torch.nn.RNN too; SRUpp with its equations in PyTorch eager
and with the official module (pip install sru==3.0.0.dev6; it compiles C++ when it is imported). "TSDAE step" is a
training step (forward, backward, AdamW), "TSDAE encode" the embeddings of sentences of ids, "IMDB step" a training step
of the classifier with RRALSTM (Adadelta), "IMDB RRALSTM" its recurrent layer alone: each compared with the same in
PyTorch eager. A peer that is not installed is left out, with a line that says so. Before anything is timed, every peer
must give minigrad's outputs and gradients (over the first 100 steps of RRALSTM, LSTM, IRNN and RWA, 25 of URNN); after
a training step, every parameter must have moved by as much too. A peer that differs gets no figure, and the exit status
is 1.

Each side runs in alternating blocks with a pause before each, at 1 and at 2 BLAS threads, and its figure is the minimum
over at least 15 calls. A ratio is judged "unsteady" when the median of either side exceeds twice its minimum: measure
again on a quieter machine.

With --device gpu there are other rows, at larger sizes (--only: sru, lstm, rra, srupp, attention, tsdae, mnist): the
two launches of SRU's recurrence; LSTM compared with cuDNN's; RRALSTM, SRU, SRU++ and softmax attention with PyTorch
eager and torch.compile; a training step of TSDAE; and one of pixel MNIST's model, from which the time of an epoch
follows. Times are medians between CUDA events. The card's rates (a copy, a float32 product, a launch) are measured
first; a row's floor is what its bytes and flops take at these rates. A row that fails is noted and the others go on;
nothing is begun after --seconds; --json is rewritten after every row. Exit status 1: a row of minigrad's own failed, or
a peer differs.

Expect: the table of rows; bytes per step and unit; cost over S, B and K and, for SRU and SRU++, over L; what a byte
costs an SRU++ model at the beginning and at the end of a text. With --json all of it in one file. On a GPU: the card,
its rates, and a block of lines per row.
"""

import sys

from tasks.bench.main import main
from tasks.frame import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(lambda argv: main(argv, __doc__)))
