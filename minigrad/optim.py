"""Optimizers.

g is a parameter's gradient, theta its value; every accumulator starts at zero. A step clips, decays, then moves. The
usual order is: zero_grad, forward, backward, step.

All take these keywords:

    weight_decay    adds weight_decay * theta to g (AdamW and RAdam decay theta itself instead)
    no_decay        parameters without weight decay (biases, gains, those that get no gradient)
    clip_value      every entry of every gradient is first clipped to [-clip_value, clip_value]; None: no clipping
    clip_norm       then the gradients are scaled so that their global norm is at most clip_norm; None: no scaling

Both clip `Parameter.grad` in place, by `minigrad.clipping`.
"""

import math

from minigrad import kernels
from minigrad.backend import array_module
from minigrad.check import check_number
from minigrad.clipping import clip_grad_norm, clip_grad_value
from minigrad.memory import cache_blocks
from minigrad.parameter import unique_parameters


class Optimizer:
    """Base: a subclass names its accumulators in `slots` and writes `update(theta, g, *accumulators)`.

    `accumulators[slot]` is a list of arrays, one per parameter, in the order of `parameters`; together with `steps`,
    the number of steps taken, it is all that a resumed run needs. They take the parameters' dtype and device when the
    optimizer is made: convert or move a layer before.

    kernel      the name of the CUDA kernel with the same update (kernels/optim.cu); None: plain CuPy on a GPU
    places      the accumulators in the kernel's order; one that is not in `slots` is absent
    scalars()   the kernel's numbers of this step, after the two of the weight decay

    Raises ValueError for a setting out of range or a no_decay parameter that is not among the parameters.
    """

    slots = ()
    kernel = None
    places = ()
    decoupled = False              # weight decay of theta itself, not added to the gradient

    def __init__(self, parameters, lr, *, weight_decay=0.0, no_decay=(), clip_norm=None, clip_value=None):
        name = type(self).__name__
        self.parameters = unique_parameters(parameters, name)
        check_number(name, "lr", lr, 0, open_high=True)
        check_number(name, "weight_decay", weight_decay, 0, open_high=True)
        for option, value in (("clip_norm", clip_norm), ("clip_value", clip_value)):
            if value is not None:
                check_number(name, option, value, 0)
        self.lr, self.weight_decay, self.steps = lr, weight_decay, 0
        self.clip_norm, self.clip_value = clip_norm, clip_value
        spared = {id(parameter) for parameter in unique_parameters(no_decay, name)} if no_decay else set()
        if spared - {id(parameter) for parameter in self.parameters}:
            raise ValueError(f"{name}: no_decay has a parameter that is not among the parameters; expected some of "
                             "them")
        self.decays = [id(parameter) not in spared for parameter in self.parameters]
        self.accumulators = {slot: [array_module(p.value).zeros_like(p.value) for p in self.parameters]
                             for slot in self.slots}

    def step(self):
        """Update every parameter once, in place."""
        if self.clip_value is not None:
            clip_grad_value(self.parameters, self.clip_value)
        if self.clip_norm is not None:
            clip_grad_norm(self.parameters, self.clip_norm)
        self.steps += 1
        fused = kernels.of(array_module(self.parameters[0].value))
        if fused and self.fused_step(fused):
            return
        for n, parameter in enumerate(self.parameters):
            arrays = [parameter.value, parameter.grad, *(self.accumulators[slot][n] for slot in self.slots)]
            for part in cache_blocks(parameter.value):           # every operation is elementwise
                theta, g, *accumulators = (array[part] for array in arrays)
                if self.weight_decay and self.decays[n]:
                    g = self.decay(theta, g)
                self.update(theta, g, **dict(zip(self.slots, accumulators)))

    def fused_step(self, fused):
        """Update every parameter in one launch; False, with nothing done, if that is not possible."""
        if self.kernel is None:
            return False
        slots = [self.accumulators[place] if place in self.slots else [None] * len(self.parameters)
                 for place in self.places]
        rows = [(p.value, p.grad, *accumulators) for p, *accumulators in zip(self.parameters, *slots)]
        l2, shrink = (0.0, 1 - self.lr * self.weight_decay) if self.decoupled else (float(self.weight_decay), 1.0)
        return fused.optimizer_step(self.kernel, rows, tuple(self.decays), l2, shrink, self.scalars())

    def scalars(self):
        return ()

    def decay(self, theta, g):
        """The gradient with that of the L2 penalty: g + weight_decay * theta."""
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

    kernel = "sgd"

    def __init__(self, parameters, lr=0.01, **options):
        super().__init__(parameters, lr, **options)

    def update(self, theta, g):
        theta -= self.lr * g

    def scalars(self):
        return (float(self.lr),)


class Momentum(Optimizer):
    """v <- momentum v + g;  theta <- theta - lr v  (nesterov: theta - lr (g + momentum v))."""

    slots = ("v",)
    kernel, places = "momentum", ("v",)

    def __init__(self, parameters, lr=0.01, *, momentum=0.9, nesterov=False, **options):
        super().__init__(parameters, lr, **options)
        check_number("Momentum", "momentum", momentum, 0, 1, open_high=True)
        self.momentum, self.nesterov = momentum, nesterov

    def update(self, theta, g, v):
        v *= self.momentum
        v += g
        theta -= self.lr * (g + self.momentum * v if self.nesterov else v)

    def scalars(self):
        return float(self.lr), float(self.momentum), int(self.nesterov)


class Adadelta(Optimizer):
    """Zeiler 2012, algorithm 1, with a step size lr (the paper's is 1):

        E[g^2]  <- rho E[g^2] + (1-rho) g^2
        delta    = g sqrt(E[d^2] + eps) / sqrt(E[g^2] + eps)
        E[d^2]  <- rho E[d^2] + (1-rho) delta^2
        theta   <- theta - lr delta
    """

    slots = ("E_g2", "E_d2")
    kernel, places = "adadelta", ("E_g2", "E_d2")

    def __init__(self, parameters, lr=1.0, *, rho=0.95, eps=1e-6, **options):
        super().__init__(parameters, lr, **options)
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

    def scalars(self):
        return tuple(map(float, (self.lr, self.rho, 1 - self.rho, self.eps)))


class RMSprop(Optimizer):
    """Tieleman and Hinton 2012; centred as in Graves 2013. eps is outside the root, or with `eps_inside` in it:

        E[g^2] <- rho E[g^2] + (1-rho) g^2          n = E[g^2]
        E[g]   <- rho E[g] + (1-rho) g              n = E[g^2] - E[g]^2     (centred)
        v      <- momentum v + g / r                r = sqrt(n) + eps       or sqrt(n + eps)   (eps_inside)
        theta  <- theta - lr v

    Graves 2013 is centred with eps_inside; so is the deeplearning.net tutorial's (rho 0.95, momentum 0.9, eps 1e-4).
    """

    slots = ("E_g2", "E_g", "v")
    kernel, places = "rmsprop", ("E_g2", "E_g", "v")

    def __init__(self, parameters, lr=1e-3, *, rho=0.9, eps=1e-8, momentum=0.0, centred=False, eps_inside=False,
                 **options):
        check_number("RMSprop", "rho", rho, 0, 1, open_high=True)
        check_number("RMSprop", "eps", eps, 0, open_low=True, open_high=True)
        check_number("RMSprop", "momentum", momentum, 0, 1, open_high=True)
        self.rho, self.eps, self.momentum = rho, eps, momentum
        self.centred, self.eps_inside = centred, eps_inside
        self.slots = ("E_g2", *(["E_g"] if centred else []), *(["v"] if momentum else []))
        super().__init__(parameters, lr, **options)

    def update(self, theta, g, E_g2, E_g=None, v=None):
        xp = array_module(theta)
        E_g2 *= self.rho
        E_g2 += (1 - self.rho) * g * g
        variance = E_g2
        if self.centred:
            E_g *= self.rho
            E_g += (1 - self.rho) * g
            variance = xp.maximum(E_g2 - E_g * E_g, 0)           # rounding can take it below zero
        move = g / (xp.sqrt(variance + self.eps) if self.eps_inside else xp.sqrt(variance) + self.eps)
        if self.momentum:
            v *= self.momentum
            v += move
            move = v
        theta -= self.lr * move

    def scalars(self):
        numbers = tuple(map(float, (self.lr, self.rho, 1 - self.rho, self.eps, self.momentum)))
        return *numbers, int(self.centred), int(self.eps_inside)


class Adam(Optimizer):
    """Kingma and Ba 2015, algorithm 1, at its t-th step:

        m <- beta1 m + (1-beta1) g            m_hat = m / (1 - beta1^t)
        v <- beta2 v + (1-beta2) g^2          v_hat = v / (1 - beta2^t)
        theta <- theta - lr m_hat / (sqrt(v_hat) + eps)
    """

    slots = ("m", "v")
    kernel, places = "adam", ("m", "v")

    def __init__(self, parameters, lr=1e-3, *, betas=(0.9, 0.999), eps=1e-8, **options):
        super().__init__(parameters, lr, **options)
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

    def scalars(self):
        return self._scalars(1.0, math.sqrt(1 - self.betas[1]**self.steps), adaptive=1)

    def _scalars(self, scale, root, adaptive):
        """The move is lr scale m_hat / (sqrt(v) / root + eps); without `adaptive` lr scale m_hat."""
        beta1, beta2 = self.betas
        lr = self.lr / (1 - beta1**self.steps) * scale
        return *map(float, (lr, beta1, 1 - beta1, beta2, 1 - beta2, root, self.eps)), adaptive


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019): first theta <- (1 - lr weight_decay) theta."""

    decoupled = True

    def __init__(self, parameters, lr=1e-3, *, weight_decay=0.01, **options):
        super().__init__(parameters, lr, weight_decay=weight_decay, **options)

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

    The paper's condition is rho_t > 4, where r_t is first defined; 5 is PyTorch's (the authors' code has >= 5). The
    paper has no eps; here it is added to sqrt(v), as in PyTorch, not to sqrt(v_hat) as in Adam. With beta2 = 0.999 the
    first five steps are of the second kind; with beta2 <= 2/3 all are.
    """

    def __init__(self, parameters, lr=1e-3, *, weight_decay=0.0, **options):
        super().__init__(parameters, lr, weight_decay=weight_decay, **options)

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

    def scalars(self):
        r = rectification(self.steps, self.betas[1])
        if r is None:
            return self._scalars(1.0, 1.0, adaptive=0)
        return self._scalars(r * math.sqrt(1 - self.betas[1]**self.steps), 1.0, adaptive=1)


def rectification(t, beta2):
    """r_t of RAdam, None if rho_t <= 5. It depends on the step alone, so that nothing waits for a GPU."""
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * t * beta2**t / (1 - beta2**t)
    if rho <= 5:
        return None
    return math.sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))
