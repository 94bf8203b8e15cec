// One step of LSTM and RRALSTM (Wang 2017, arXiv 1709.03714, equations 7 to 10; minigrad/layers/lstm.py, rra.py), but
// for the product with h_{t-1}, which the caller computes. The backward: docs/derivations/lstm.md and rra.md.
//
//     z   = x_t W + h_{t-1} U + b                            the gates i, f, o, g side by side
//     i, f, o = sigma(z_i), sigma(z_f), sigma(z_o);   g = tanh(z_g)
//     c_t = f c_{t-1} + i g
//     a_t = sum_k w_hat[k-1] h_{t-k-offset+1},  k = 1 ... K  (LSTM: K = 0)
//     q_t = tanh(c_t + a_t)
//     h_t = o q_t
//
// A thread has one unit j of one sample b. hs holds the past before the sequence and the sequence: row P + t is h_t.

extern "C" __global__ void lstm_forward(
    const REAL* hU,                   // (B, 4, h)
    const REAL* b,                    // (4, h)
    const REAL* w_hat,                // (K,)
    REAL* gates,                      // (T, B, 4, h): x W before; row t becomes i, f, o, g
    REAL* hs,                         // (P+T, B, h)
    Acc* c,                           // (B, h): c_{t-1} before, c_t after; Half would round it at every step
    REAL* cs,                         // (T+1, B, h): row t + 1 is c_t
    REAL* q,                          // (T, B, h)
    Index t, Index B, Index h, Index P, Index K, Index offset) {
    const Index n = thread_number(), Bh = B * h;
    if (n >= Bh) return;
    const Index j = n % h, first = n / h * 4 * h + j;
    REAL* gates_t = gates + t * 4 * Bh + first;
    auto z = [=](Index gate) { return load(gates_t, gate * h) + load(hU, first + gate * h) + load(b, gate * h + j); };
    const Acc i = sigmoid(z(0)), f = sigmoid(z(1)), o = sigmoid(z(2)), g = tanh(z(3));
    const Acc c_t = f * c[n] + i * g;
    Acc a = 0;
    #pragma unroll 4
    for (Index k = 1; k <= K; k++) a += load(w_hat, k - 1) * load(hs, (P + t - k - offset + 1) * Bh + n);
    const Acc q_t = tanh(c_t + a);
    store(gates_t, 0, i);
    store(gates_t, h, f);
    store(gates_t, 2 * h, o);
    store(gates_t, 3 * h, g);
    c[n] = c_t;
    store(cs, (t + 1) * Bh + n, c_t);
    store(q, t * Bh + n, q_t);
    store(hs, (P + t) * Bh + n, o * q_t);
}

// The gradient of h_t from the windows of steps t + offset ...: sum_k w_hat[k-1] ds_{t+k+offset-1} over existing steps.
__device__ inline Acc owed_by_windows(const REAL* ds, const REAL* w_hat, Index t, Index T, Index Bh, Index n, Index K,
                                      Index offset) {
    Acc sum = 0;
    #pragma unroll 4
    for (Index k = 1; k <= K; k++) {
        const Index later = t + k + offset - 1;
        if (later >= 0 && later < T) sum += load(w_hat, k - 1) * load(ds, later * Bh + n);
    }
    return sum;
}

// Step t of backward, with dh = G_t + dz_{t+1} U^T + the windows' gradient, and dc the gradient of c_t:
//
//     ds = dh o (1 - q_t^2)          dc += ds
//     dz_i = dc g i (1 - i);  dz_f = dc c_{t-1} f (1 - f);  dz_o = dh q_t o (1 - o);  dz_g = dc i (1 - g^2)
//     dc of c_{t-1} = dc f
//
// A step after a sample's last one is skipped: dc passes it unchanged, and every gradient there is 0.

extern "C" __global__ void lstm_backward(
    const REAL* dhs,                  // (P+T, B, h): row P + t is G_t, what reaches h_t from outside
    const REAL* dzU,                  // (B, h): dz_{t+1} U^T, or 0
    const REAL* w_hat, const REAL* gates, const REAL* cs, const REAL* q,     // as in forward
    const Index* lengths,             // (B,) or 0 for T each
    REAL* ds,                         // (T, B, h); not used for K = 0
    REAL* dz,                         // (T, B, 4, h)
    Acc* dc,                          // (B, h): of c_t before, of c_{t-1} after
    Index t, Index T, Index B, Index h, Index P, Index K, Index offset) {
    const Index n = thread_number(), Bh = B * h;
    if (n >= Bh) return;
    const Index first = t * 4 * Bh + n / h * 4 * h + n % h;
    Acc s = 0, dz_i = 0, dz_f = 0, dz_o = 0, dz_g = 0;
    if (!lengths || t < lengths[n / h]) {
        const Acc i = load(gates, first), f = load(gates, first + h), o = load(gates, first + 2 * h),
                  g = load(gates, first + 3 * h), q_t = load(q, t * Bh + n);
        const Acc dh = load(dhs, (P + t) * Bh + n) + (dzU ? load(dzU, n) : Acc(0))
                     + owed_by_windows(ds, w_hat, t, T, Bh, n, K, offset);
        s = dh * o * (1 - q_t * q_t);
        const Acc dc_t = dc[n] + s;
        dz_i = dc_t * g * i * (1 - i);
        dz_f = dc_t * load(cs, t * Bh + n) * f * (1 - f);
        dz_o = dh * q_t * o * (1 - o);
        dz_g = dc_t * i * (1 - g * g);
        dc[n] = dc_t * f;
    }
    if (K) store(ds, t * Bh + n, s);
    store(dz, first, dz_i);
    store(dz, first + h, dz_f);
    store(dz, first + 2 * h, dz_o);
    store(dz, first + 3 * h, dz_g);
}

// The gradient of the states before the sequence, rows 0 ... P-1 of dhs: the first windows' gradient is added, and, to
// the newest, h_{-1}, dz_0 U^T. A thread has one unit of one state.

extern "C" __global__ void lstm_backward_past(
    REAL* dhs, const REAL* dzU, const REAL* w_hat, const REAL* ds,
    Index T, Index B, Index h, Index P, Index K, Index offset) {
    const Index i = thread_number(), Bh = B * h;
    if (i >= P * Bh) return;
    const Index row = i / Bh, n = i % Bh;
    Acc sum = load(dhs, i) + owed_by_windows(ds, w_hat, row - P, T, Bh, n, K, offset);
    if (row == P - 1 && dzU) sum += load(dzU, n);
    store(dhs, i, sum);
}

// dw_hat[k-1] = sum_t <ds_t, h_{t-k-offset+1}>: ds times the rows of hs from P - k - offset + 1 on. Block (x, k-1)
// writes its part to sums[k-1, x]; the caller adds the parts.

extern "C" __global__ void lstm_window_weights(
    const REAL* ds, const REAL* hs, Acc* sums, Index T, Index B, Index h, Index P, Index offset) {
    const Index Bh = B * h, k = blockIdx.y + 1, stride = (Index)gridDim.x * blockDim.x;
    const REAL* window = hs + (P - k - offset + 1) * Bh;
    Acc sum = 0;
    for (Index i = thread_number(); i < T * Bh; i += stride) sum += load(ds, i) * load(window, i);
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[(Index)blockIdx.y * gridDim.x + blockIdx.x] = sum;
}
