"""Optimizers: against PyTorch, and against a plain version of each formula; identity, dtype, bad input."""

import math

import numpy as np
import pytest

from minigrad import Parameter, Sequential, memory
from minigrad.clipping import clip_grad_norm, clip_grad_value
from minigrad.layers import Linear
from minigrad.optim import SGD, Adadelta, Adam, AdamW, Momentum, RAdam, RMSprop

STEPS = 60
SHAPES = [(3, 4), (5,), (), (2, 1, 3), (0,), (1,)]


# ---- the formulas ----------------------------------------------------------------------------------------
# Each is a coroutine of one array: it is sent (theta, g, lr) and yields the new theta.


def sgd(weight_decay=0.0):
    theta = None
    while True:
        theta, g, lr = yield theta
        theta = theta - lr * (g + weight_decay * theta)


def momentum(momentum=0.9, nesterov=False, weight_decay=0.0):
    theta, v = None, 0.0
    while True:
        theta, g, lr = yield theta
        g = g + weight_decay * theta
        v = momentum * v + g
        theta = theta - lr * (g + momentum * v if nesterov else v)


def adadelta(rho=0.95, eps=1e-6, weight_decay=0.0):
    theta, E_g2, E_d2 = None, 0.0, 0.0
    while True:
        theta, g, lr = yield theta
        g = g + weight_decay * theta
        E_g2 = rho * E_g2 + (1 - rho) * g**2
        delta = -np.sqrt(E_d2 + eps) / np.sqrt(E_g2 + eps) * g
        E_d2 = rho * E_d2 + (1 - rho) * delta**2
        theta = theta + lr * delta


def rmsprop(rho=0.9, eps=1e-8, momentum=0.0, centred=False, weight_decay=0.0, eps_inside=False):
    theta, E_g2, E_g, v = None, 0.0, 0.0, 0.0
    while True:
        theta, g, lr = yield theta
        g = g + weight_decay * theta
        E_g2 = rho * E_g2 + (1 - rho) * g**2
        E_g = rho * E_g + (1 - rho) * g
        variance = E_g2 - E_g**2 if centred else E_g2
        root = np.sqrt(variance + eps) if eps_inside else np.sqrt(variance) + eps
        v = momentum * v + g / root
        theta = theta - lr * v


def adam(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=False):
    theta, m, v, t = None, 0.0, 0.0, 0
    while True:
        theta, g, lr = yield theta
        t += 1
        if decoupled:
            theta = theta - lr * weight_decay * theta
        else:
            g = g + weight_decay * theta
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        theta = theta - lr * (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)


def adamw(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    return adam(betas, eps, weight_decay, decoupled=True)


def radam(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
    theta, m, v, t = None, 0.0, 0.0, 0
    while True:
        theta, g, lr = yield theta
        t += 1
        theta = theta - lr * weight_decay * theta
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        m_hat = m / (1 - betas[0] ** t)
        rho, rho_inf = radam_rho(t, betas[1]), 2 / (1 - betas[1]) - 1
        if rho > 5:
            l = math.sqrt(1 - betas[1] ** t) / (np.sqrt(v) + eps)
            r = math.sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))
            theta = theta - lr * m_hat * r * l
        else:
            theta = theta - lr * m_hat


def radam_rho(t, beta2):
    return 2 / (1 - beta2) - 1 - 2 * t * beta2**t / (1 - beta2**t)


# (ours, the formula, PyTorch's, lr, settings)
CASES = {
    "SGD": (SGD, sgd, "SGD", 0.1, {}),
    "SGD, decay": (SGD, sgd, "SGD", 0.1, {"weight_decay": 0.3}),
    "Momentum": (Momentum, momentum, "SGD", 0.05, {"momentum": 0.9}),
    "Momentum, decay": (Momentum, momentum, "SGD", 0.05, {"momentum": 0.7, "weight_decay": 0.3}),
    "Momentum, none": (Momentum, momentum, "SGD", 0.05, {"momentum": 0.0}),
    "Nesterov": (Momentum, momentum, "SGD", 0.05, {"momentum": 0.9, "nesterov": True}),
    "Nesterov, decay": (Momentum, momentum, "SGD", 0.05, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.3}),
    "Adadelta": (Adadelta, adadelta, "Adadelta", 1.0, {"rho": 0.95, "eps": 1e-6}),
    "Adadelta, lr": (Adadelta, adadelta, "Adadelta", 0.5, {"rho": 0.95, "eps": 1e-6}),
    "Adadelta, decay": (Adadelta, adadelta, "Adadelta", 1.0, {"rho": 0.8, "eps": 1e-3, "weight_decay": 0.3}),
    "RMSprop": (RMSprop, rmsprop, "RMSprop", 0.01, {"rho": 0.9}),
    "RMSprop, decay": (RMSprop, rmsprop, "RMSprop", 0.01, {"rho": 0.99, "eps": 1e-2, "weight_decay": 0.3}),
    "RMSprop, centred": (RMSprop, rmsprop, "RMSprop", 0.01, {"rho": 0.9, "centred": True}),
    "RMSprop, momentum": (RMSprop, rmsprop, "RMSprop", 0.01, {"rho": 0.9, "momentum": 0.8}),
    "RMSprop, all": (RMSprop, rmsprop, "RMSprop", 0.01,
                     {"rho": 0.95, "eps": 1e-4, "momentum": 0.9, "centred": True, "weight_decay": 0.1}),
    "RMSprop, the tutorial's": (RMSprop, rmsprop, None, 1e-4,
                                {"rho": 0.95, "eps": 1e-4, "momentum": 0.9, "centred": True, "eps_inside": True}),
    "RMSprop, eps inside": (RMSprop, rmsprop, None, 0.01, {"rho": 0.9, "eps": 1e-2, "eps_inside": True}),
    "Adam": (Adam, adam, "Adam", 0.01, {}),
    "Adam, decay": (Adam, adam, "Adam", 0.01, {"betas": (0.8, 0.98), "eps": 1e-4, "weight_decay": 0.3}),
    "AdamW": (AdamW, adamw, "AdamW", 0.01, {}),
    "AdamW, decay": (AdamW, adamw, "AdamW", 0.01, {"betas": (0.8, 0.98), "eps": 1e-4, "weight_decay": 0.3}),
    "AdamW, no decay": (AdamW, adamw, "AdamW", 0.01, {"weight_decay": 0.0}),
    "RAdam": (RAdam, radam, "RAdam", 0.01, {}),
    "RAdam, decay": (RAdam, radam, "RAdam", 0.01, {"weight_decay": 0.3}),
    "RAdam, soon": (RAdam, radam, "RAdam", 0.01, {"betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.1}),
    "RAdam, never": (RAdam, radam, "RAdam", 0.01, {"betas": (0.9, 0.6)}),            # rho_inf is 4
}
TORCH_NAMES = {"RMSprop": {"rho": "alpha", "centred": "centered"}}
TORCH_SETTINGS = {"RAdam": {"decoupled_weight_decay": True}}
ONE_OF_EACH = ["SGD", "Momentum", "Nesterov", "Adadelta", "RMSprop", "RMSprop, all", "Adam", "AdamW", "RAdam"]


def parameters_and_gradients(dtype="float64"):
    """Parameters of several shapes, and for each step a list of gradients, of quite different sizes."""
    rng = np.random.default_rng(0)
    parameters = [Parameter(np.asarray(rng.standard_normal(shape), dtype), f"p{n}") for n, shape in enumerate(SHAPES)]
    gradients = [[np.asarray(rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 2), dtype) for shape in SHAPES]
                 for _ in range(STEPS)]
    gradients[7] = [np.zeros_like(g) for g in gradients[7]]
    return parameters, gradients


def lr_at(step, lr):
    """Halved half-way: an lr may be changed between steps."""
    return lr if step < STEPS // 2 else lr / 2


def run(optimizer, gradients, lr):
    """Take all steps; returns the parameters' values after each."""
    history = []
    for step, step_gradients in enumerate(gradients):
        optimizer.lr = lr_at(step, lr)
        for p, g in zip(optimizer.parameters, step_gradients):
            p.grad[...] = g
        optimizer.step()
        history.append([p.value.copy() for p in optimizer.parameters])
    return history


@pytest.mark.parametrize("name", CASES)
def test_equals_the_formula(name):
    ours, formula, _, lr, settings = CASES[name]
    parameters, gradients = parameters_and_gradients()
    start = [p.value.copy() for p in parameters]
    history = run(ours(parameters, lr=lr, **settings), gradients, lr)
    for n, theta in enumerate(start):
        cell = formula(**settings)
        next(cell)
        for step in range(STEPS):
            theta = cell.send((theta, gradients[step][n], lr_at(step, lr)))
            np.testing.assert_allclose(history[step][n], theta, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][2]])      # None: PyTorch has no such form
def test_equals_pytorch(name):
    torch = pytest.importorskip("torch")
    ours, _, theirs, lr, settings = CASES[name]
    parameters, gradients = parameters_and_gradients()
    tensors = [torch.tensor(p.value, requires_grad=True) for p in parameters]
    names = TORCH_NAMES.get(theirs, {})
    translated = {names.get(key, key): value for key, value in settings.items()}
    peer = getattr(torch.optim, theirs)(tensors, lr=lr, **translated, **TORCH_SETTINGS.get(theirs, {}))
    history = run(ours(parameters, lr=lr, **settings), gradients, lr)
    for step in range(STEPS):
        peer.param_groups[0]["lr"] = lr_at(step, lr)
        for tensor, g in zip(tensors, gradients[step]):
            tensor.grad = torch.tensor(g)
        peer.step()
        for tensor, value in zip(tensors, history[step]):
            np.testing.assert_allclose(value, tensor.detach().numpy(), rtol=1e-10, atol=1e-10)


def test_defaults_are_pytorchs_but_for_the_papers():
    """Adadelta's rho is the paper's 0.95 (PyTorch 0.9), RMSprop's rho and lr are Hinton's (PyTorch 0.99, 0.01)."""
    p = [Parameter(np.zeros(1))]
    assert (Adadelta(p).lr, Adadelta(p).rho, Adadelta(p).eps) == (1.0, 0.95, 1e-6)
    assert (RMSprop(p).lr, RMSprop(p).rho, RMSprop(p).eps) == (1e-3, 0.9, 1e-8)
    assert (Adam(p).lr, Adam(p).betas, Adam(p).eps, Adam(p).weight_decay) == (1e-3, (0.9, 0.999), 1e-8, 0.0)
    assert (AdamW(p).lr, AdamW(p).betas, AdamW(p).eps, AdamW(p).weight_decay) == (1e-3, (0.9, 0.999), 1e-8, 0.01)
    assert (RAdam(p).lr, RAdam(p).betas, RAdam(p).eps, RAdam(p).weight_decay) == (1e-3, (0.9, 0.999), 1e-8, 0.0)


def test_radam_begins_as_momentum_and_becomes_adaptive_at_its_sixth_step():
    """With a constant gradient m_hat is g: steps of lr g while rho_t <= 5, then of lr r_t sign(g)."""
    assert radam_rho(5, 0.999) < 5 < radam_rho(6, 0.999)
    g, lr = np.array([100.0, -1e-3]), 0.01
    p = Parameter(np.zeros(2))
    p.grad[...] = g
    optimizer, moves = RAdam([p], lr=lr, eps=1e-12), []
    for _ in range(3000):
        before = p.value.copy()
        optimizer.step()
        moves.append(before - p.value)
    np.testing.assert_allclose(moves[:5], [lr * g] * 5, rtol=1e-9)
    for t in (6, 7, 20, 3000):
        rho, top = radam_rho(t, 0.999), 1999
        r = math.sqrt((rho - 4) / (top - 4) * (rho - 2) / (top - 2) * top / rho)
        np.testing.assert_allclose(moves[t - 1], lr * r * np.sign(g), rtol=1e-6)
    assert r == pytest.approx(1, abs=0.1)                        # slowly it becomes Adam


# ---- arrays ----------------------------------------------------------------------------------------------


def make(name, parameters):
    ours, _, _, lr, settings = CASES[name]
    return ours(parameters, lr=lr, **settings)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_steps_are_in_place_and_leave_gradients_alone(name):
    parameters, gradients = parameters_and_gradients()
    values, grads = [p.value for p in parameters], [p.grad for p in parameters]
    optimizer = make(name, parameters)
    accumulators = [array for arrays in optimizer.accumulators.values() for array in arrays]
    run(optimizer, gradients[:3], optimizer.lr)
    assert all(p.value is value and p.grad is grad for p, value, grad in zip(parameters, values, grads))
    assert [id(a) for arrays in optimizer.accumulators.values() for a in arrays] == [id(a) for a in accumulators]
    for p, g in zip(parameters, gradients[2]):
        np.testing.assert_array_equal(p.grad, g)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_step_block_by_block_is_the_same_bit_for_bit(name, monkeypatch):
    def moved(block):
        monkeypatch.setattr(memory, "CACHE_BLOCK", block)
        parameters, gradients = parameters_and_gradients()
        assert len(memory.cache_blocks(parameters[0].value)) == (1 if block > 1000 else 3)
        optimizer = make(name, parameters)
        return run(optimizer, gradients[:5], optimizer.lr)[-1]
    for blocked, whole in zip(moved(40), moved(10**6)):
        np.testing.assert_array_equal(blocked, whole)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_dtype_is_kept_and_float32_follows_float64(name):
    """With a learning rate that is a NumPy scalar too, as a schedule may give."""
    histories = []
    for dtype in ("float32", "float64"):
        parameters, gradients = parameters_and_gradients(dtype)
        optimizer = make(name, parameters)
        histories.append(run(optimizer, gradients, np.float64(0.01))[-1])
        for p, *accumulators in zip(parameters, *optimizer.accumulators.values()):
            assert {array.dtype for array in (p.value, p.grad, *accumulators)} == {np.dtype(dtype)}
    for single, double in zip(*histories):
        np.testing.assert_allclose(single, double, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_zero_grad_fills_in_place(name):
    parameters, _ = parameters_and_gradients()
    optimizer = make(name, parameters)
    grads, views = [p.grad for p in parameters], [p.grad.reshape(-1)[:1] for p in parameters]
    for grad in grads:
        grad += 2
    optimizer.zero_grad()
    assert all(p.grad is grad for p, grad in zip(parameters, grads))
    assert not any(view.any() for view in views)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_shared_parameter_steps_once(name):
    def moved(repeat):
        shared, other = Parameter(np.ones(3), "shared"), Parameter(np.ones(2), "other")
        optimizer = make(name, [shared, other, *[shared] * repeat])
        assert optimizer.parameters == [shared, other]
        for _ in range(3):
            shared.grad[...] = [1.0, -2.0, 0.5]
            optimizer.step()
        return shared.value

    np.testing.assert_array_equal(moved(0), moved(2))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_continued_optimizer_needs_accumulators_and_steps_only(name):
    parameters, gradients = parameters_and_gradients()
    whole = run(make(name, parameters), gradients, 0.01)[-1]
    parameters, gradients = parameters_and_gradients()
    first = make(name, parameters)
    run(first, gradients[:20], 0.01)
    second = make(name, [Parameter(p.value.copy()) for p in parameters])
    for slot, arrays in first.accumulators.items():
        for mine, array in zip(second.accumulators[slot], arrays):
            mine[...] = array
    second.steps = first.steps
    for step in range(20, STEPS):
        second.lr = lr_at(step, 0.01)
        for p, g in zip(second.parameters, gradients[step]):
            p.grad[...] = g
        second.step()
    for p, value in zip(second.parameters, whole):
        np.testing.assert_array_equal(p.value, value)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_lr_zero_and_a_zero_gradient_move_nothing(name):
    p = Parameter(np.ones(3))
    ours, _, _, lr, settings = CASES[name]
    p.grad[...] = 5
    ours([p], lr=0, **settings).step()
    np.testing.assert_array_equal(p.value, 1)
    p.grad[...] = 0
    optimizer = ours([p], lr=lr, **{**settings, "weight_decay": 0.0})
    optimizer.step()
    np.testing.assert_array_equal(p.value, 1)


def test_centred_rmsprop_survives_a_constant_gradient():
    """E[g^2] - E[g]^2 tends to 0 and by rounding below it."""
    p = Parameter(np.ones(100, "float32"))
    optimizer = RMSprop([p], lr=1e-6, centred=True)
    gradient = np.random.default_rng(0).uniform(1, 2, 100).astype("float32")
    for _ in range(400):
        p.grad[...] = gradient
        optimizer.step()
    assert np.isfinite(p.value).all()


def test_optimizers_minimise():
    for name in ONE_OF_EACH:
        p = Parameter(np.array([3.0, -2.0]))
        optimizer = make(name, [p])
        for _ in range(3000):
            optimizer.zero_grad()
            p.grad += p.value * [1.0, 10.0]
            optimizer.step()
        assert abs(p.value).max() < (2.5 if name == "Adadelta" else 0.1), name


# ---- parameters that are not decayed ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_no_decay_spares_its_parameters_and_no_other(name):
    """Bit for bit: each moves as in an optimizer that decays all, or none. A parameter may be named twice."""
    ours, _, _, lr, settings = CASES[name]

    def moved(weight_decay, spared=lambda parameters: ()):
        parameters, gradients = parameters_and_gradients()
        optimizer = ours(parameters, lr=lr, **{**settings, "weight_decay": weight_decay}, no_decay=spared(parameters))
        return run(optimizer, gradients[:10], lr)[-1]
    all_decay, none_decay = moved(0.3), moved(0.0)
    some_decay = moved(0.3, lambda parameters: iter([*parameters[::2], *parameters[::2]]))
    for n, value in enumerate(some_decay):
        np.testing.assert_array_equal(value, (all_decay if n % 2 else none_decay)[n])
        assert value.size == 0 or (all_decay[n] != none_decay[n]).any()
    for value, expected in zip(moved(0.3, lambda parameters: parameters), none_decay):
        np.testing.assert_array_equal(value, expected)


def test_no_decay_of_a_tied_layer_is_by_identity():
    """A shared parameter is spared under any of its places; an equal one is another."""
    cell, equal = Linear(2, 2, rng=0), Linear(2, 2, rng=0)
    optimizer = AdamW(Sequential(cell, equal, cell).parameters(), lr=0.1, weight_decay=0.5, no_decay=cell.parameters())
    before = cell.W.value.copy()
    optimizer.step()
    np.testing.assert_array_equal(cell.W.value, before)
    np.testing.assert_allclose(equal.W.value, 0.95 * before, rtol=1e-6)


def test_a_wrong_no_decay_is_named():
    layer, foreign = Linear(2, 2), Linear(2, 2)
    empty = (p for p in [])
    for no_decay, error, sentence in (
            ([layer.b, foreign.b], ValueError, "no_decay has a parameter that is not among the parameters; expected"),
            (foreign.parameters(), ValueError, "no_decay has a parameter that is not among the parameters"),
            (empty, ValueError, "got no parameters .a generator is empty once it has been walked"),
            (layer.b, TypeError, "got a single Parameter; expected an iterable"),
            (layer.named_parameters(), TypeError, "got a tuple among the parameters")):
        with pytest.raises(error, match=f"AdamW: {sentence}") as caught:
            AdamW(layer.parameters(), no_decay=no_decay)
        assert "\n" not in str(caught.value)


# ---- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [SGD, Momentum, Adadelta, RMSprop, Adam, AdamW, RAdam])
def test_parameters_are_required(make):
    name, layer = make.__name__, Linear(2, 2)
    generator = (p for p in layer.parameters())
    assert len(make(generator).parameters) == 2
    for parameters, error, sentence in (
            (generator, ValueError, "got no parameters .a generator is empty once it has been walked"),
            (layer.W, TypeError, "got a single Parameter; expected an iterable"),
            (layer, TypeError, "got a single Linear; expected an iterable"),
            (layer.named_parameters(), TypeError, "got a tuple among the parameters"),
            ([layer.W, layer.W.value], TypeError, "got a ndarray among the parameters")):
        with pytest.raises(error, match=f"{name}: {sentence}"):
            make(parameters)


BAD = {"lr": [-0.1, np.nan, np.inf, "0.1", None, True], "weight_decay": [-1, np.nan, np.inf],
       "clip_norm": [-1, np.nan, "1"], "clip_value": [-1, np.nan, "1"],
       "momentum": [-0.1, 1, 1.5, np.nan], "rho": [-0.1, 1, np.nan], "eps": [0, -1e-8, np.nan, np.inf],
       "betas": [0.9, (0.9,), (0.9, 0.99, 0.999), None], "betas[0]": [(1.0, 0.9), (-0.1, 0.9), (np.nan, 0.9)],
       "betas[1]": [(0.9, 1), (0.9, "x")]}
TAKES = {SGD: [], Momentum: ["momentum"], Adadelta: ["rho", "eps"], RMSprop: ["rho", "eps", "momentum"],
         Adam: ["betas", "betas[0]", "betas[1]", "eps"], AdamW: ["betas", "betas[0]", "betas[1]", "eps"],
         RAdam: ["betas", "betas[0]", "betas[1]", "eps"]}


@pytest.mark.parametrize("make", TAKES)
def test_bad_settings_are_named(make):
    for argument in ["lr", "weight_decay", "clip_norm", "clip_value", *TAKES[make]]:
        for value in BAD[argument]:
            with pytest.raises(ValueError) as error:
                make([Parameter(np.zeros(1))], **{argument.partition("[")[0]: value})
            assert str(error.value).startswith(f"{make.__name__}: {argument} is ")
            assert "; expected a " in str(error.value)


# ---- clipping in the step --------------------------------------------------------------------------------

@pytest.mark.parametrize("make", [SGD, Momentum, Adadelta, RMSprop, Adam, AdamW, RAdam])
def test_a_step_clips_first_by_value_then_by_norm(make):
    def stepped(by_hand):
        parameters = [Parameter(np.ones(2), "W"), Parameter(np.ones(1), "b")]
        optimizer = make(parameters, **({} if by_hand else {"clip_value": 3.0, "clip_norm": 2.0}))
        for _ in range(2):
            for p, gradient in zip(parameters, ([3.0, -40.0], [0.5])):
                p.grad[...] = gradient
            if by_hand:
                clip_grad_value(parameters, 3.0)
                clip_grad_norm(parameters, 2.0)
            optimizer.step()
        return [array.copy() for p in parameters for array in (p.value, p.grad)]
    for got, expected in zip(stepped(False), stepped(True)):
        np.testing.assert_array_equal(got, expected)
    for option in ("clip_norm", "clip_value"):
        with pytest.raises(ValueError, match=f"{make.__name__}: {option} is -1; expected a number in"):
            make([Parameter(np.ones(1), "W")], **{option: -1})
