// Optimizers and gradient clipping (minigrad/optim.py, whose docstrings name the papers) over all parameters of one dtype
// in one launch.
//
// A table in device memory says where the arrays are. Its row of a parameter, COLUMNS numbers: the addresses of theta,
// g and up to three accumulators (0: absent), the size, and whether it decays. `work` says what a block does: (the
// row, the first entry), CHUNK entries each.

const int COLUMNS = 7, SLOTS = 3, CHUNK = 4096;

struct Entries {
    REAL *theta, *g, *slots[SLOTS];
    Index first, end;
    bool decays;
};

__device__ inline Entries entries_of_block(const Index* table, const Index* work) {
    const Index* row = table + work[2 * (Index)blockIdx.x] * COLUMNS;
    const Index first = work[2 * (Index)blockIdx.x + 1], size = row[2 + SLOTS];
    const Index end = first + CHUNK < size ? first + CHUNK : size;
    Entries e = {(REAL*)row[0], (REAL*)row[1], {}, first, end, row[3 + SLOTS] != 0};
    for (int s = 0; s < SLOTS; s++) e.slots[s] = (REAL*)row[2 + s];
    return e;
}

// update(theta, g, slots) updates one entry. Weight decay comes first: g + l2 theta, or (decoupled) theta shrink.
template <class Update>
__device__ inline void for_each_entry(const Index* table, const Index* work, double l2, double shrink, Update update) {
    const Entries e = entries_of_block(table, work);
    for (Index i = e.first + threadIdx.x; i < e.end; i += blockDim.x) {
        Acc theta = load(e.theta, i), g = load(e.g, i), slots[SLOTS];
        for (int s = 0; s < SLOTS; s++) slots[s] = e.slots[s] ? load(e.slots[s], i) : Acc(0);
        if (e.decays) {
            if (l2 != 0) g += Acc(l2) * theta;
            theta *= Acc(shrink);
        }
        update(theta, g, slots);
        store(e.theta, i, theta);
        for (int s = 0; s < SLOTS; s++)
            if (e.slots[s]) store(e.slots[s], i, slots[s]);
    }
}

// theta <- theta - lr g
extern "C" __global__ void sgd(const Index* table, const Index* work, double l2, double shrink, double lr) {
    for_each_entry(table, work, l2, shrink, [=](Acc& theta, Acc g, Acc*) { theta -= Acc(lr) * g; });
}

// v <- momentum v + g;  theta <- theta - lr v  (nesterov: theta - lr (g + momentum v))
extern "C" __global__ void momentum(
    const Index* table, const Index* work, double l2, double shrink, double lr, double momentum, Index nesterov) {
    for_each_entry(table, work, l2, shrink, [=](Acc& theta, Acc g, Acc* slots) {
        const Acc v = slots[0] = Acc(momentum) * slots[0] + g;
        theta -= Acc(lr) * (nesterov ? g + Acc(momentum) * v : v);
    });
}

// E[g^2]  <- rho E[g^2] + (1-rho) g^2
// delta    = g sqrt(E[d^2] + eps) / sqrt(E[g^2] + eps)
// E[d^2]  <- rho E[d^2] + (1-rho) delta^2
// theta   <- theta - lr delta
extern "C" __global__ void adadelta(
    const Index* table, const Index* work, double l2, double shrink, double lr, double rho, double rest, double eps) {
    for_each_entry(table, work, l2, shrink, [=](Acc& theta, Acc g, Acc* slots) {
        slots[0] = Acc(rho) * slots[0] + Acc(rest) * g * g;
        const Acc delta = sqrt(slots[1] + Acc(eps)) / sqrt(slots[0] + Acc(eps)) * g;
        slots[1] = Acc(rho) * slots[1] + Acc(rest) * delta * delta;
        theta -= Acc(lr) * delta;
    });
}

// E[g^2] <- rho E[g^2] + (1-rho) g^2          variance = E[g^2];  centred: E[g^2] - E[g]^2
// E[g]   <- rho E[g] + (1-rho) g              r = sqrt(variance) + eps;  eps_inside: sqrt(variance + eps)
// v      <- momentum v + g / r                theta <- theta - lr v
extern "C" __global__ void rmsprop(
    const Index* table, const Index* work, double l2, double shrink, double lr, double rho, double rest, double eps,
    double momentum, Index centred, Index eps_inside) {
    for_each_entry(table, work, l2, shrink, [=](Acc& theta, Acc g, Acc* slots) {
        Acc variance = slots[0] = Acc(rho) * slots[0] + Acc(rest) * g * g;
        if (centred) {
            slots[1] = Acc(rho) * slots[1] + Acc(rest) * g;
            variance -= slots[1] * slots[1];
            if (variance < 0) variance = 0;                                  // possible by rounding
        }
        const Acc move = g / (eps_inside ? sqrt(variance + Acc(eps)) : sqrt(variance) + Acc(eps));
        slots[2] = Acc(momentum) * slots[2] + move;                          // 0 without momentum: v is the move
        theta -= Acc(lr) * slots[2];
    });
}

// m <- beta1 m + (1-beta1) g;  v <- beta2 v + (1-beta2) g^2
// theta <- theta - step m / (sqrt(v) / root + eps)            Adam: step = lr / (1 - beta1^t), root = sqrt(1 - beta2^t)
// theta <- theta - step m                                     adaptive = 0: RAdam's first steps
extern "C" __global__ void adam(
    const Index* table, const Index* work, double l2, double shrink, double step, double beta1, double rest1,
    double beta2, double rest2, double root, double eps, Index adaptive) {
    for_each_entry(table, work, l2, shrink, [=](Acc& theta, Acc g, Acc* slots) {
        const Acc m = slots[0] = Acc(beta1) * slots[0] + Acc(rest1) * g;
        const Acc v = slots[1] = Acc(beta2) * slots[1] + Acc(rest2) * g * g;
        theta -= Acc(step) * (adaptive ? m / (sqrt(v) / Acc(root) + Acc(eps)) : m);
    });
}

// ---- the gradient's norm, in float64 -------------------------------------------------------------------------

// parts[block] = the largest |g_i|.
extern "C" __global__ void largest_gradient(const Index* table, const Index* work, double* parts, Index first_part) {
    const Entries e = entries_of_block(table, work);
    double most = 0;
    for (Index i = e.first + threadIdx.x; i < e.end; i += blockDim.x) most = larger(most, fabs((double)load(e.g, i)));
    most = block_largest(most);
    if (threadIdx.x == 0) parts[first_part + blockIdx.x] = most;
}

// parts[block] = sum (g_i / scale)^2.
extern "C" __global__ void gradient_squares(
    const Index* table, const Index* work, const double* scale, double* parts, Index first_part) {
    const Entries e = entries_of_block(table, work);
    double sum = 0;
    for (Index i = e.first + threadIdx.x; i < e.end; i += blockDim.x) {
        const double x = load(e.g, i) / scale[0];
        sum += x * x;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) parts[first_part + blockIdx.x] = sum;
}

// g_i <- g_i factor
extern "C" __global__ void shrink_gradients(const Index* table, const Index* work, const double* factor) {
    const Entries e = entries_of_block(table, work);
    for (Index i = e.first + threadIdx.x; i < e.end; i += blockDim.x) store(e.g, i, load(e.g, i) * Acc(factor[0]));
}

// g_i <- max(-c, min(g_i, c)); NaN stays
extern "C" __global__ void clip_gradients(const Index* table, const Index* work, double c) {
    const Entries e = entries_of_block(table, work);
    for (Index i = e.first + threadIdx.x; i < e.end; i += blockDim.x) {
        const Acc g = load(e.g, i);
        store(e.g, i, g > Acc(c) ? Acc(c) : g < -Acc(c) ? -Acc(c) : g);
    }
}

// g_i <- 0
extern "C" __global__ void zero_gradients(const Index* table, const Index* work) {
    const Entries e = entries_of_block(table, work);
    for (Index i = e.first + threadIdx.x; i < e.end; i += blockDim.x) store(e.g, i, Acc(0));
}
