"""Every public layer through every rule of the contract (shared design, "Checking"); see cases.py for the table."""

import importlib
import inspect
import pkgutil

import numpy as np
import pytest
from cases import TABLE, B, L, mask_kinds
from helpers import (
    all_gradients,
    assert_close,
    assert_identical,
    flat,
    floats,
    grads,
    newest,
    run_forward,
    snapshot,
    upstream,
)

import minigrad
import minigrad.layers
import models
import models.regressor
from minigrad import Layer, gradcheck
from minigrad.backend import asnumpy, to_device
from minigrad.layers import Stack
from minigrad.layers.recurrent import Recurrent
from minigrad.tree import tree_map

RECURRENT = [case for case in TABLE if case.state]
MASKED = [case for case in TABLE if case.masks]
CONTINUED = [case for case in RECURRENT if case.segments]


def with_fast_loops(layer):
    """The layer and those in it that have `fast` set."""
    if getattr(layer, "fast", False):
        yield layer
    for _, child in layer.children():
        if isinstance(child, Layer):
            yield from with_fast_loops(child)


def equations(case):
    """The layer with its fast loops turned off."""
    layer = case.layer()
    for inner in with_fast_loops(layer):
        inner.fast = False
    return layer


FAST = [case for case in TABLE if any(with_fast_loops(case.layer()))]


def ids(case):
    return case.name


every_layer = pytest.mark.parametrize("case", TABLE, ids=ids)
every_continued = pytest.mark.parametrize("case", CONTINUED, ids=ids)
every_recurrent = pytest.mark.parametrize("case", RECURRENT, ids=ids)


# ---- the table is complete -------------------------------------------------------------------------------

def layer_classes(package):
    """Every public Layer class defined in a package's modules."""
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for name, value in vars(importlib.import_module(info.name)).items():
            public = inspect.isclass(value) and issubclass(value, Layer) and not name.startswith("_")
            if public and value.__module__ == info.name and value is not Recurrent:     # a base, no layer of its own
                yield value


def test_every_public_layer_is_in_the_table():
    listed = {type(case.layer()) for case in TABLE}
    public = {getattr(minigrad.layers, name) for name in minigrad.layers.__all__}
    public |= {minigrad.Sequential, minigrad.Residual}
    public |= set(layer_classes(models)) | set(layer_classes(minigrad.layers))
    assert public - listed == set()


def test_every_layer_of_the_package_is_exported():
    defined = {cls.__name__ for cls in layer_classes(minigrad.layers)}
    assert defined == set(minigrad.layers.__all__)


# ---- gradients -------------------------------------------------------------------------------------------

@every_layer
def test_gradients(case):
    """Every entry; then in directions, the equations of a layer that has a fast loop (gradcheck does so itself)."""
    report = gradcheck(case.layer(), (case.x(),), case.keywords())
    assert report.ok, report
    if case not in FAST:
        report = gradcheck(case.layer(), (case.x(),), case.keywords(), mode="direction")
        assert report.ok, report


@pytest.mark.slow
@pytest.mark.parametrize("case", MASKED, ids=ids)
def test_gradients_where_a_sample_has_no_real_step(case):
    """Of the equations, which the fast loops are held to below; without a state, unless it starts at -inf."""
    keywords = {**case.keywords(), case.mask_name: mask_kinds()["a sample with no real step"]}
    if not case.own_start:
        keywords.pop("state", None)
    report = gradcheck(equations(case), (case.x(),), keywords, mode="direction")
    assert report.ok, report


@pytest.mark.parametrize("case", [case for case in RECURRENT if case.own_start or case not in FAST], ids=ids)
def test_gradients_without_state_and_mask(case):
    """Of rows without a fast loop, and of those with a start of their own, whose gradient is checked nowhere else."""
    report = gradcheck(equations(case), (case.x(),), mode="direction")
    assert report.ok, report


# ---- fast and plain --------------------------------------------------------------------------------------

def part_of(tree, samples, steps):
    """Some samples, and the first `steps` steps of what is a mask or ids; memories and states keep their length."""
    return each_array(lambda a: a[:samples, :steps] if a.ndim == 2 and a.shape[1] == L else a[:samples], tree)


@pytest.mark.parametrize("case", FAST, ids=ids)
@pytest.mark.parametrize(("samples", "steps"), [(B, L), (1, L), (B, 1), (B, 0)], ids=str)
def test_fast_equals_plain(case, samples, steps):
    """Outputs, states and every gradient, with a state and without, with a mask and without."""
    fast, plain = case.layer(), equations(case)
    if not steps and not case.state:
        pytest.skip("a model that reads the last output has none of an empty sequence")
    full = part_of(case.keywords(), samples, steps)
    bare = {name: value for name, value in full.items() if name not in ("state", "mask", "rng")}
    masks = [full.get("mask"), part_of(mask_kinds()["a sample with no real step"], samples, steps)]
    for keywords in [full, bare, *({**bare, "mask": mask} for mask in masks if case.masks and mask is not None)]:
        x = case.x()[:samples, :steps]
        dout = upstream(run_forward(plain, x, keywords)[0])
        assert_close(all_gradients(fast, x, keywords, dout), all_gradients(plain, x, keywords, dout), 1e-11)


# ---- states and upstream gradients -----------------------------------------------------------------------
# That nothing is written and nothing hidden, gradcheck itself holds every row to (minigrad/gradcheck).

@every_recurrent
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
def test_a_state_is_a_copy(case, masked):
    layer, keywords = case.layer(), case.keywords()
    (y, state), cache = run_forward(layer, case.x(), keywords if masked else {"state": keywords["state"]})
    held = snapshot((y, cache))
    for array in flat(state):
        array[...] = np.nan if array.dtype.kind == "f" else False
    assert_identical(snapshot((y, cache)), held)


def memory_of(array):
    """The bytes that an array keeps alive: its own, or those of what it is a view of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.nbytes


@every_recurrent
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
def test_a_state_and_its_gradient_keep_no_other_memory_alive(case, masked):
    keywords, steps = case.keywords(), 20
    x = np.concatenate([case.x()] * steps, axis=1)
    mask = {"mask": np.concatenate([keywords["mask"]] * steps, axis=1)} if masked else {}
    for layer in (case.layer(), equations(case)):
        (y, state), cache = layer.forward(x, state=keywords["state"], **mask)
        _, dstate0 = layer.backward(upstream((y, state)), cache)
        for array in floats((state, dstate0)):
            assert memory_of(array) <= 1.2 * array.nbytes + 256              # recycled memory comes in sizes


@every_layer
def test_a_wrong_upstream_gradient_is_refused(case):
    layer = case.layer()
    out, cache = run_forward(layer, case.x(), case.keywords())
    dout = upstream(out)
    dy = dout[0] if case.state else dout
    wrong = [(dy[..., None], ValueError), (dy[:1], ValueError), (np.ones(dy.shape, int), TypeError)]
    for bad, error in wrong:
        with pytest.raises(error, match=r"shape|dtype"):
            layer.backward((bad, None) if case.state else bad, cache)
    if case.state:
        for bad, error in ((dy, TypeError), ((dy, dout[1][:-1]), ValueError), ((dy, 1.0), ValueError)):
            with pytest.raises(error, match=r"expected"):
                layer.backward(bad, cache)


@every_layer
def test_zero_upstream_gives_zero(case):
    layer = case.layer()
    out, cache = run_forward(layer, case.x(), case.keywords())
    returned = layer.backward(tree_map(np.zeros_like, out), cache)
    assert not any(leaf.any() for leaf in flat(returned) + grads(layer))


# ---- shapes and masks ------------------------------------------------------------------------------------

def each_array(function, tree):
    """tree_map over the arrays alone; flags and seeds stay as they are."""
    return tree_map(lambda leaf: function(leaf) if hasattr(leaf, "dtype") else leaf, tree)


def rows(tree, n):
    """Sample n of every array, as a batch of one."""
    return each_array(lambda a: a[n:n + 1], tree)


@pytest.mark.parametrize("case", [case for case in TABLE if not case.draws], ids=ids)
def test_batched_equals_unbatched(case):
    layer, x, keywords = case.layer(), case.x(), case.keywords()
    dout = upstream(run_forward(layer, x, keywords)[0])
    out, returned, total = all_gradients(layer, x, keywords, dout)
    sums = [np.zeros_like(g) for g in total]
    for n in range(B):
        one_out, one_returned, one_grads = all_gradients(layer, rows(x, n), rows(keywords, n), rows(dout, n))
        assert_close(one_out, rows(out, n))
        assert_close(one_returned, rows(returned, n))
        sums = [a + b for a, b in zip(sums, one_grads)]
    assert_close(total, sums)


@pytest.mark.parametrize("kind", ["left padding", "a sample with no real step"])
@every_recurrent
def test_masked_steps_are_as_if_they_were_not_there(case, kind):
    """y, dx 0 at them; final state and all gradients those of the sequence without them; NaN there never leaks."""
    layer, keywords, mask = case.layer(), case.keywords(), mask_kinds()[kind]
    keywords.pop("rng", None)
    x = case.x() if case.ids else np.where(mask[:, :, None], case.x(), np.nan)
    keywords["mask"] = mask
    (y, state), cache = layer.forward(x, **keywords)
    dy, dstate = upstream((y, state))
    layer.zero_grad()
    dx, dstate0 = layer.backward((np.where(mask[:, :, None], dy, np.nan), dstate), cache)
    got = grads(layer)
    assert not y[~mask].any()
    dx = np.zeros(mask.shape) if case.ids else dx
    assert not dx[~mask].any()
    layer.zero_grad()
    for n in range(B):
        real = mask[n]
        (y_n, state_n), cache_n = layer.forward(x[n:n + 1, real], state=rows(keywords["state"], n))
        dx_n, dstate0_n = layer.backward((dy[n:n + 1, real], newest(rows(dstate, n), state_n)), cache_n)
        assert_close((y[n:n + 1, real], newest(rows(state, n), state_n)), (y_n, state_n))
        dx_n = np.zeros((1, real.sum())) if case.ids else dx_n
        assert_close((dx[n:n + 1, real], rows(dstate0, n)), (dx_n, dstate0_n))
    assert_close(got, grads(layer))


@every_layer
def test_padding_changes_nothing(case):
    """What stands at a padded position, NaN included, changes nothing at the real ones."""
    layer, x, mask = case.layer(), case.x(), mask_kinds()["right padding"]
    if x.ndim < 3 and not case.ids:
        x, mask = np.repeat(x[:, None], mask.shape[1], axis=1), mask
    keywords = {**case.keywords(), case.mask_name: mask} if case.masks or not case.extra else case.keywords()
    garbage = np.where(mask, x, case.ids - 1 - x) if case.ids else np.where(
        mask[:, :, None], x, 99.0 if not case.masks else np.nan)
    out, cache = run_forward(layer, x, keywords)
    other, other_cache = run_forward(layer, garbage, keywords)
    y, other_y = flat(out)[0], flat(other)[0]
    per_step = y.shape[:2] == mask.shape
    assert_identical(y[mask] if per_step else y, other_y[mask] if per_step else other_y)
    if case.masks:
        dout = upstream(out)
        first = snapshot((layer.backward(dout, cache), grads(layer)))
        layer.zero_grad()
        assert_identical((layer.backward(dout, other_cache), grads(layer)), first)


@pytest.mark.slow
@every_layer
def test_a_sequence_of_length_one(case):
    keywords = case.keywords()
    if case.masks:
        keywords[case.mask_name] = np.array([[True], [False], [True]])
    x = case.x()[:, :1] if len(case.shape) == 3 or case.ids else case.x()
    report = gradcheck(equations(case), (x,), keywords, mode="direction")
    assert report.ok, report


@every_recurrent
def test_an_empty_sequence_keeps_the_state(case):
    layer, keywords = case.layer(), case.keywords()
    (y, state), cache = layer.forward(case.x()[:, :0], state=keywords["state"])
    assert y.shape[:2] == (B, 0)
    assert_identical(state, keywords["state"])
    dstate = upstream(state)
    dx, dstate0 = layer.backward((upstream(y), dstate), cache)
    assert case.ids or dx.shape == (B, 0, case.shape[2])
    assert_identical(floats(dstate0), floats(dstate))


@pytest.mark.parametrize("cuts", [(1, 2), (3,), (1, 2, 3, 4, 5, 6)], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
@every_continued
def test_one_piece_equals_segments(case, masked, cuts):
    """Values, final state, and all gradients when each segment's dstate0 is handed back to the one before."""
    layer, x, keywords = case.layer(), case.x(), case.keywords()
    mask = keywords["mask"] if masked else np.ones(x.shape[:2], bool)
    out, cache = layer.forward(x, state=keywords["state"], mask=mask if masked else None)
    dy, dstate = upstream(out)
    layer.zero_grad()
    dx, dstate0 = layer.backward((dy, dstate), cache)
    whole = grads(layer)

    parts = [slice(a, b) for a, b in zip((0, *cuts), (*cuts, x.shape[1]))]
    state, ys, caches = keywords["state"], [], []
    for part in parts:
        (y, state), cache = layer.forward(x[:, part], state=state, mask=mask[:, part] if masked else None)
        ys.append(y)
        caches.append(cache)
    assert_close((np.concatenate(ys, axis=1), state), out)
    layer.zero_grad()
    dxs = []
    for part, cache in zip(reversed(parts), reversed(caches)):
        dx_part, dstate = layer.backward((dy[:, part], dstate), cache)
        dxs.insert(0, dx_part)
    assert_close(dstate, dstate0)
    assert case.ids or np.allclose(np.concatenate(dxs, axis=1), dx, rtol=1e-12, atol=1e-12)
    assert_close(grads(layer), whole)


@every_recurrent
def test_a_missing_state_is_a_initial_state(case):
    layer, x = case.layer(), case.x()
    zeros = layer.initial_state(B) if case.own_start else tree_map(np.zeros_like, case.keywords()["state"])
    (y, state), cache = layer.forward(x)
    (y_zero, state_zero), cache_zero = layer.forward(x, state=zeros)
    assert_close((y, state), (y_zero, newest(state_zero, state)))         # empty slots of a memory add zeros to sums
    dout, dout_zero = upstream((y, state)), upstream((y_zero, state_zero))
    returned = layer.backward(dout, cache)
    assert isinstance(returned, tuple)
    assert len(returned) == 2
    dx, dstate0 = layer.backward((dout[0], dout_zero[1]), cache_zero)
    assert_close((returned[0], newest(returned[1], dstate0)), (dx, newest(dstate0, returned[1])))


# ---- memory layout, dtype, device ------------------------------------------------------------------------

def strided(array):
    """The same numbers, every axis strided or reversed, not contiguous in any order."""
    wide = np.zeros(tuple(2 * n + 1 for n in array.shape), array.dtype)
    view = wide[tuple(slice(1, None, 2) for _ in array.shape)]
    view[...] = array
    return view


@every_layer
def test_non_contiguous_inputs(case):
    layer, x, keywords = case.layer(), case.x(), case.keywords()
    out, cache = run_forward(layer, x, keywords)
    dout = upstream(out)
    returned, expected = layer.backward(dout, cache), grads(layer)
    layer.zero_grad()
    spread = each_array(strided, keywords)
    assert not strided(x).flags.forc
    out2, cache2 = run_forward(layer, strided(x), spread)
    assert_close(out2, out)
    assert_close(layer.backward(tree_map(strided, dout), cache2), returned)
    assert_close(grads(layer), expected)


@every_layer
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dtype_is_kept(case, dtype):
    layer = case.layer(dtype)
    out, cache = run_forward(layer, case.x(dtype=dtype), case.keywords(dtype=dtype))
    returned = layer.backward(upstream(out), cache)
    for array in floats(out) + floats(returned) + grads(layer) + [p.value for p in layer.parameters()]:
        assert array.dtype == dtype


def widened(tree):
    """The same with its float32 arrays in float64."""
    return tree_map(lambda a: a.astype("float64") if getattr(a, "dtype", None) == np.float32 else a, tree)


@every_layer
def test_single_precision_agrees_with_double(case):
    single, double = case.layer("float32"), case.layer("float64")
    for p, q in zip(single.parameters(), double.parameters()):
        q.value[...] = p.value
    x, keywords = case.x(dtype="float32"), case.keywords(dtype="float32")
    if case.draws:                                                       # float32 and float64 draws differ
        keywords["rng"] = None
    wide_x, wide = widened(x), widened(keywords)
    out = run_forward(double, wide_x, wide)[0]
    dout = upstream(out)
    narrow = tree_map(lambda a: a.astype("float32"), dout)
    got, expected = all_gradients(single, x, keywords, narrow), all_gradients(double, wide_x, wide, dout)
    assert_close(got, expected, 2e-4)


@every_layer
def test_the_call_drops_the_cache(case):
    layer, x, keywords = case.layer(), case.x(), case.keywords()
    keywords.pop("rng", None)
    assert_identical(layer(x, **keywords), layer.forward(x, **keywords)[0])


@pytest.mark.parametrize("case", [case for case in TABLE if not case.ids], ids=ids)         # integers widen nothing
@pytest.mark.parametrize(("x_dtype", "layer_dtype"), [("float32", "float64"), ("float64", "float32")])
def test_mixed_dtypes_give_the_wider_one(case, x_dtype, layer_dtype):
    """The wider dtype's numbers, not the narrower ones' stored in it."""
    layer = case.layer("float32").astype(layer_dtype)
    wide = case.layer("float32").astype("float64")
    x, keywords = case.x(dtype=x_dtype), {**case.keywords(dtype=x_dtype), "rng": None}
    out, cache = run_forward(layer, x, keywords)
    expected, _ = run_forward(wide, *(widened([x, keywords]) if wide.parameters() else [x, keywords]))
    assert_close(out, expected)
    assert {a.dtype for a in flat(out)} == {a.dtype for a in flat(expected)}
    layer.backward(upstream(out), cache)
    assert all(p.grad.dtype == layer_dtype for p in layer.parameters())


@every_layer
def test_an_empty_batch(case):
    keywords = each_array(lambda a: a[:0], case.keywords())
    layer = case.layer()
    out, cache = run_forward(layer, case.x()[:0], keywords)
    returned = layer.backward(upstream(out), cache)
    assert all(a.shape[0] == 0 for a in flat(out) + flat(returned))
    assert not any(g.any() for g in grads(layer))


class Drawing(Recurrent):
    """A recurrent layer that draws random numbers, as one with dropout inside would."""

    def forward(self, x, state=None, mask=None, rng=None):
        return (x if rng is None else x * rng.random(x.shape), ()), (rng,)


def test_composites_pass_the_one_rng_down():
    stack, x = Stack(Drawing(), Drawing()), np.ones((2, 3, 4))
    (y, _), _ = stack.forward(x, rng=np.random.default_rng(0))
    rng = np.random.default_rng(0)
    assert_identical(y, rng.random(x.shape) * rng.random(x.shape))
    model = models.regressor.SequenceRegressor(Drawing(), 4, rng=0, dtype="float64")
    y, _ = model.forward(x, rng=np.random.default_rng(0))
    drawn = np.random.default_rng(0).random(x.shape)
    assert_close(y, drawn[:, -1] @ model.readout.W.value)


@pytest.mark.gpu
@every_layer
def test_cpu_equals_gpu(case):
    layer, x = case.layer(), case.x()
    keywords = {name: value for name, value in case.keywords().items() if name != "rng"}
    out, cache = layer.forward(x, **keywords)
    dout = upstream(out)
    returned, expected = layer.backward(dout, cache), grads(layer)
    layer.to_device("gpu").zero_grad()
    there = {**to_device(keywords, "gpu"), **case.flags}                     # a flag stays Python's
    gpu_out, gpu_cache = layer.forward(to_device(x, "gpu"), **there)
    gpu_returned = layer.backward(to_device(dout, "gpu"), gpu_cache)
    assert_close(tree_map(asnumpy, (gpu_out, gpu_returned)), (out, returned), 1e-9)
    assert_close([asnumpy(p.grad) for p in layer.parameters()], expected, 1e-9)
