"""Optimizers and gradient clipping.

g is a parameter's gradient, theta its value; every accumulator starts at zero. `weight_decay` adds
weight_decay * theta to g inside the step, after any clipping (AdamW and RAdam decay theta itself instead).
The usual order is: zero_grad, forward, backward, clip, step.
"""

import math
import sys

from minigrad import kernels
from minigrad.backend import array_module, cache_blocks
from minigrad.check import check_number
from minigrad.parameter import Parameter


def unique_parameters(parameters, owner):
    """The parameters as a list, a shared one once.

    Raises TypeError for something else, ValueError for none at all (a generator can be walked only once).
    """
    if not hasattr(parameters, "__iter__"):
        raise TypeError(f"{owner}: got a single {type(parameters).__name__}; expected an iterable of Parameters, "
                        "layer.parameters() for example")
    unique = {}
    for parameter in parameters:
        if not isinstance(parameter, Parameter):
            raise TypeError(f"{owner}: got a {type(parameter).__name__} among the parameters; expected Parameters")
        unique[id(parameter)] = parameter
    if not unique:
        raise ValueError(f"{owner}: got no parameters (a generator is empty once it has been walked); "
                         "expected layer.parameters()")
    return list(unique.values())


class Optimizer:
    """Base: a subclass names its accumulators in `slots` and writes `update(theta, g, *accumulators)`.

    no_decay: parameters that weight_decay leaves alone (biases, gains, those that get no gradient).

    `accumulators[slot]` is a list of arrays, one a parameter, in the order of `parameters`; with `steps`, the
    number of steps taken, it is all that a continued run needs. They are made with the dtype and on the device that the
    parameters have then: convert or move a layer first.
    """

    slots = ()

    def __init__(self, parameters, lr, weight_decay=0.0, no_decay=()):
        name = type(self).__name__
        self.parameters = unique_parameters(parameters, name)
        check_number(name, "lr", lr, 0, open_high=True)
        check_number(name, "weight_decay", weight_decay, 0, open_high=True)
        self.lr, self.weight_decay, self.steps = lr, weight_decay, 0
        spared = {id(parameter) for parameter in unique_parameters(no_decay, name)} if no_decay else set()
        if spared - {id(parameter) for parameter in self.parameters}:
            raise ValueError(f"{name}: no_decay has a parameter that is not among the parameters; expected some of "
                             "them")
        self.decays = [id(parameter) not in spared for parameter in self.parameters]
        self.accumulators = {slot: [array_module(p.value).zeros_like(p.value) for p in self.parameters]
                             for slot in self.slots}

    def step(self):
        """Move every parameter once, in place."""
        self.steps += 1
        fused = kernels.of(array_module(self.parameters[0].value))
        if fused and fused.optimizer_step(self):
            return
        for n, parameter in enumerate(self.parameters):
            arrays = [parameter.value, parameter.grad, *(self.accumulators[slot][n] for slot in self.slots)]
            for part in cache_blocks(parameter.value):           # every operation is elementwise
                theta, g, *accumulators = (array[part] for array in arrays)
                if self.weight_decay and self.decays[n]:
                    g = self.decay(theta, g)
                self.update(theta, g, *accumulators)

    def decay(self, theta, g):
        """The gradient with the L2 penalty's: g + weight_decay * theta."""
        return g + self.weight_decay * theta

    def update(self, theta, g, *accumulators):
        raise NotImplementedError(f"{type(self).__name__} has no update")

    def zero_grad(self):
        """Fill every gradient with zeros, in place."""
        if fused := kernels.of(array_module(self.parameters[0].grad)):
            fused.zero_gradients([parameter.grad for parameter in self.parameters])
            return
        for parameter in self.parameters:
            parameter.zero_grad()

    def __repr__(self):
        settings = ", ".join(f"{k}={v}" for k, v in vars(self).items() if isinstance(v, int | float | tuple))
        return f"{type(self).__name__}({settings})"


class SGD(Optimizer):
    """theta <- theta - lr g."""

    def __init__(self, parameters, lr=0.01, weight_decay=0.0, no_decay=()):
        super().__init__(parameters, lr, weight_decay, no_decay)

    def update(self, theta, g):
        theta -= self.lr * g


class Momentum(Optimizer):
    """v <- momentum v + g;  theta <- theta - lr v  (nesterov: theta - lr (g + momentum v))."""

    slots = ("v",)

    def __init__(self, parameters, lr=0.01, momentum=0.9, nesterov=False, weight_decay=0.0, no_decay=()):
        super().__init__(parameters, lr, weight_decay, no_decay)
        check_number("Momentum", "momentum", momentum, 0, 1, open_high=True)
        self.momentum, self.nesterov = momentum, nesterov

    def update(self, theta, g, v):
        v *= self.momentum
        v += g
        theta -= self.lr * (g + self.momentum * v if self.nesterov else v)


class Adadelta(Optimizer):
    """Zeiler 2012, algorithm 1, with a step size lr (the paper's is 1):

        E[g^2]  <- rho E[g^2] + (1-rho) g^2
        delta    = g sqrt(E[d^2] + eps) / sqrt(E[g^2] + eps)
        E[d^2]  <- rho E[d^2] + (1-rho) delta^2
        theta   <- theta - lr delta
    """

    slots = ("E_g2", "E_d2")

    def __init__(self, parameters, lr=1.0, rho=0.95, eps=1e-6, weight_decay=0.0, no_decay=()):
        super().__init__(parameters, lr, weight_decay, no_decay)
        check_number("Adadelta", "rho", rho, 0, 1, open_high=True)
        check_number("Adadelta", "eps", eps, 0, open_low=True, open_high=True)
        self.rho, self.eps = rho, eps

    def update(self, theta, g, E_g2, E_d2):
        xp = array_module(theta)
        E_g2 *= self.rho
        E_g2 += (1 - self.rho) * g * g
        delta = xp.sqrt(E_d2 + self.eps) / xp.sqrt(E_g2 + self.eps) * g
        E_d2 *= self.rho
        E_d2 += (1 - self.rho) * delta * delta
        theta -= self.lr * delta


class RMSprop(Optimizer):
    """Tieleman and Hinton 2012; centred as in Graves 2013. eps is outside the root, or with `eps_inside` in it:

        E[g^2] <- rho E[g^2] + (1-rho) g^2          n = E[g^2]
        E[g]   <- rho E[g] + (1-rho) g              n = E[g^2] - E[g]^2     (centred)
        v      <- momentum v + g / r                r = sqrt(n) + eps       or sqrt(n + eps)   (eps_inside)
        theta  <- theta - lr v

    Graves 2013 is centred with eps_inside; so is the deeplearning.net tutorial's (rho 0.95, momentum 0.9, eps 1e-4).
    """

    slots = ("E_g2", "E_g", "v")

    def __init__(self, parameters, lr=1e-3, rho=0.9, eps=1e-8, momentum=0.0, centred=False, weight_decay=0.0,
                 no_decay=(), eps_inside=False):
        check_number("RMSprop", "rho", rho, 0, 1, open_high=True)
        check_number("RMSprop", "eps", eps, 0, open_low=True, open_high=True)
        check_number("RMSprop", "momentum", momentum, 0, 1, open_high=True)
        self.rho, self.eps, self.momentum = rho, eps, momentum
        self.centred, self.eps_inside = centred, eps_inside
        self.slots = ("E_g2", *(["E_g"] if centred else []), *(["v"] if momentum else []))
        super().__init__(parameters, lr, weight_decay, no_decay)

    def update(self, theta, g, E_g2, *others):
        xp, others = array_module(theta), list(others)
        E_g2 *= self.rho
        E_g2 += (1 - self.rho) * g * g
        variance = E_g2
        if self.centred:
            E_g = others.pop(0)
            E_g *= self.rho
            E_g += (1 - self.rho) * g
            variance = xp.maximum(E_g2 - E_g * E_g, 0)           # rounding can take it below zero
        move = g / (xp.sqrt(variance + self.eps) if self.eps_inside else xp.sqrt(variance) + self.eps)
        if self.momentum:
            v = others.pop(0)
            v *= self.momentum
            v += move
            move = v
        theta -= self.lr * move


class Adam(Optimizer):
    """Kingma and Ba 2015, algorithm 1, at its t-th step:

        m <- beta1 m + (1-beta1) g            m_hat = m / (1 - beta1^t)
        v <- beta2 v + (1-beta2) g^2          v_hat = v / (1 - beta2^t)
        theta <- theta - lr m_hat / (sqrt(v_hat) + eps)
    """

    slots = ("m", "v")

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, no_decay=()):
        super().__init__(parameters, lr, weight_decay, no_decay)
        name = type(self).__name__
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise ValueError(f"{name}: betas is {betas!r}; expected a pair of numbers")
        for n, beta in enumerate(betas):
            check_number(name, f"betas[{n}]", beta, 0, 1, open_high=True)
        check_number(name, "eps", eps, 0, open_low=True, open_high=True)
        self.betas, self.eps = tuple(betas), eps

    def update(self, theta, g, m, v):
        xp, (beta1, beta2) = array_module(theta), self.betas
        m *= beta1
        m += (1 - beta1) * g
        v *= beta2
        v += (1 - beta2) * g * g
        root = xp.sqrt(v) / math.sqrt(1 - beta2**self.steps) + self.eps
        theta -= self.lr / (1 - beta1**self.steps) * m / root


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019): first theta <- (1 - lr weight_decay) theta."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, no_decay=()):
        super().__init__(parameters, lr, betas, eps, weight_decay, no_decay)

    def decay(self, theta, g):
        theta *= 1 - self.lr * self.weight_decay
        return g


class RAdam(AdamW):
    """Liu et al. 2020 (arXiv 1908.03265), algorithm 2, with AdamW's decoupled weight decay, at its t-th step:

        m, v as in Adam                       m_hat = m / (1 - beta1^t)
        rho_inf = 2 / (1 - beta2) - 1         rho_t = rho_inf - 2 t beta2^t / (1 - beta2^t)
        rho_t > 5:   r_t = sqrt((rho_t - 4) (rho_t - 2) rho_inf / ((rho_inf - 4) (rho_inf - 2) rho_t))
                     theta <- theta - lr r_t m_hat sqrt(1 - beta2^t) / (sqrt(v) + eps)
        else:        theta <- theta - lr m_hat                                (v is too uncertain to divide by)

    The paper's condition is rho_t > 4, where r_t begins; 5 is PyTorch's (its authors' code has >= 5). The paper has no
    eps; here it stands beside sqrt(v), as in PyTorch, not beside sqrt(v_hat) as in Adam. With beta2 = 0.999 the first
    five steps are of the second kind; with beta2 <= 2/3 all are.
    """

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, no_decay=()):
        super().__init__(parameters, lr, betas, eps, weight_decay, no_decay)

    def update(self, theta, g, m, v):
        xp, t, (beta1, beta2) = array_module(theta), self.steps, self.betas
        m *= beta1
        m += (1 - beta1) * g
        v *= beta2
        v += (1 - beta2) * g * g
        move = self.lr / (1 - beta1**t) * m
        r = rectification(t, beta2)
        if r is not None:
            move *= r * math.sqrt(1 - beta2**t) / (xp.sqrt(v) + self.eps)
        theta -= move


def rectification(t, beta2):
    """r_t of RAdam, None where rho_t <= 5: a number of the step alone, so that nothing waits for a GPU."""
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * t * beta2**t / (1 - beta2**t)
    if rho <= 5:
        return None
    return math.sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))


# ---- clipping --------------------------------------------------------------------------------------------

LARGEST = sys.float_info.max


def clip_grad_value(parameters, max_value):
    """g_i <- min(max(g_i, -c), c), in place, for every entry of every gradient; c = max_value.

    Changes the gradient's direction. NaN stays NaN; an infinite entry becomes +-c.
    Raises ValueError for a negative or NaN max_value.
    """
    check_number("clip_grad_value", "max_value", max_value, 0)
    gradients = [parameter.grad for parameter in unique_parameters(parameters, "clip_grad_value")]
    xp = array_module(*gradients)
    if fused := kernels.of(xp):
        fused.clip_gradients(gradients, max_value)
        return
    for g in gradients:
        xp.clip(g, -max_value, max_value, out=g)


def grad_norm(parameters):
    """N = sqrt(sum of g_i^2 over all parameters), each counted once, as a 0-d float64 array on their device.

    Computed as m sqrt(sum (g_i/m)^2) with m the largest |g_i|, in float64: neither large nor small gradients
    leave the range. Inf when an entry is infinite, NaN when one is NaN.
    """
    gradients = [p.grad for p in unique_parameters(parameters, "grad_norm")]
    xp = array_module(*gradients)
    if fused := kernels.of(xp):
        return fused.grad_norm(gradients)
    gradients = [g[part] for g in gradients if g.size for part in cache_blocks(g)]
    if not gradients:
        return xp.zeros((), "float64")
    m = xp.stack([abs(g).max() for g in gradients]).max().astype("float64")
    scale = norm_scale(xp, m)
    squares = xp.stack([((g / scale)**2).sum(dtype="float64") for g in gradients]).sum()
    return xp.asarray(scale * xp.sqrt(squares))


def norm_scale(xp, m):
    """What the gradients are divided by before they are squared: m, the largest |g_i|, where that is a divisor."""
    return xp.where(xp.isfinite(m) & (m > 0), m, LARGEST)        # the finite ones beside an Inf do not overflow


def clip_grad_norm(parameters, max_norm, error_if_nonfinite=False):
    """g <- g min(1, c/N), in place, N the global norm over all parameters, c = max_norm (Pascanu et al. 2013).

    Keeps the gradient's direction. Returns N before clipping as a 0-d array on the device, without waiting for
    it. A non-finite N makes every gradient NaN, so that the fault shows; with `error_if_nonfinite` it raises
    FloatingPointError before touching anything. max_norm=inf only measures.
    Raises ValueError for a negative or NaN max_norm.
    """
    check_number("clip_grad_norm", "max_norm", max_norm, 0)
    parameters = unique_parameters(parameters, "clip_grad_norm")
    norm = grad_norm(parameters)
    xp = array_module(norm)
    if error_if_nonfinite and not xp.isfinite(norm):
        culprits = [p.name for p in parameters if not xp.isfinite(p.grad).all()]
        raise FloatingPointError(f"clip_grad_norm: the norm is {float(norm)}; the gradient of "
                                 f"{culprits[0] if culprits else 'all together'} is not finite")
    shrink_gradients(parameters, max_norm, norm)
    return norm


def shrink_gradients(parameters, max_norm, norm):
    """The second half of `clip_grad_norm`, for a caller who has the norm (`grad_norm` of these parameters) already."""
    xp = array_module(norm)
    exceeds = norm > max_norm
    factor = xp.where(exceeds, max_norm / xp.where(exceeds, norm, 1), 1.0)   # min(1, c/N), also for N = 0 and c = inf
    factor = xp.where(xp.isfinite(norm), factor, xp.nan)
    if fused := kernels.of(xp):
        fused.shrink_gradients([parameter.grad for parameter in parameters], factor)
        return
    for parameter in parameters:
        parameter.grad *= factor.astype(parameter.grad.dtype)
