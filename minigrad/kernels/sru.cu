// The recurrence of SRU and SRU++ (Lei et al. 2018, arXiv 1709.02755; minigrad/layers/sru.py: sru_cell), one launch for
// all steps. The backward is derived in docs/derivations/sru.md.
//
//     f_t  = sigma(u1_t + v_f c_{t-1} + b_f)
//     r_t  = sigma(u2_t + v_r c_{t-1} + b_r)
//     c_t  = u0_t + f_t (c_{t-1} - u0_t)
//     h_t  = x'_t + m r_t (g(c_t) - x'_t)         x' = scale x (k = 3) or u3 (k = 4);  g the identity or tanh
//
// A thread has one channel j of one sample b and goes through time; neighbouring threads have neighbouring channels.
// u (T, B, k, h) is the result of one product n W, so that each slice of a step is read 32 numbers in a row. There are
// few threads (B h), so each reads several steps ahead: otherwise memory would wait for arithmetic at every step.

const int AHEAD = 8;                  // steps read ahead by forward
const int AHEAD_BACKWARD = 4;

struct ForwardInputs { Acc u0, u1, u2, x; };

extern "C" __global__ void sru_forward(
    const REAL* u,                    // (T, B, k, h)
    const REAL* x,                    // (T, B, h); not read for k = 4
    const REAL* v_f, const REAL* v_r, const REAL* b_f, const REAL* b_r,      // (h,)
    const REAL* m,                    // (B, h) or 0 for 1
    REAL* cs,                         // (T+1, B, h), row 0 given
    REAL* hs,                         // (T, B, h)
    double scale, Index is_tanh, Index T, Index B, Index h, Index k) {
    const Index n = thread_number(), Bh = B * h;
    if (n >= Bh) return;
    const Index b = n / h, j = n % h;
    u += b * k * h + j;
    cs += n;
    hs += n;
    const REAL* highway = k == 4 ? u + 3 * h : x + n;
    const Index highway_step = k == 4 ? Bh * k : Bh;
    const Acc s_x = k == 4 ? 1 : scale;
    const Acc vf = load(v_f, j), vr = load(v_r, j), bf = load(b_f, j), br = load(b_r, j);
    const Acc keep = m ? load(m, n) : Acc(1);
    auto inputs = [=](Index t) {
        const REAL* u_t = u + t * Bh * k;
        return ForwardInputs{load(u_t, 0), load(u_t, h), load(u_t, 2 * h), s_x * load(highway, t * highway_step)};
    };
    ForwardInputs next[AHEAD], now[AHEAD];
    #pragma unroll
    for (int s = 0; s < AHEAD; s++)
        if (s < T) next[s] = inputs(s);
    Acc c = load(cs, 0);
    for (Index first = 0; first < T; first += AHEAD) {
        #pragma unroll
        for (int s = 0; s < AHEAD; s++) now[s] = next[s];
        #pragma unroll
        for (int s = 0; s < AHEAD; s++)
            if (first + AHEAD + s < T) next[s] = inputs(first + AHEAD + s);
        #pragma unroll
        for (int s = 0; s < AHEAD; s++) {
            const Index t = first + s;
            if (t >= T) break;
            const ForwardInputs in = now[s];
            const Acc f = sigmoid(in.u1 + vf * c + bf), r = sigmoid(in.u2 + vr * c + br);
            c = in.u0 + f * (c - in.u0);
            const Acc g = is_tanh ? tanh(c) : c;
            store(cs, (t + 1) * Bh, c);
            store(hs, t * Bh, in.x + keep * r * (g - in.x));
        }
    }
}

// Backward, from the last step to the first; the gates are recomputed from u and c. With dc the gradient of c_t:
//
//     e = dh m r
//     du2 = e (g(c_t) - x') (1 - r)          dx' = dh - e
//     dc += e g'(c_t)
//     du0 = dc (1 - f)                       du1 = dc (c_{t-1} - u0) f (1 - f)
//     dc of c_{t-1} = dc f + v_f du1 + v_r du2
//     dv_f += du1 c_{t-1}    dv_r += du2 c_{t-1}    db_f += du1    db_r += du2
//
// The four sums are of one sample: the caller adds the samples. A step after a sample's last one is skipped: dc passes
// it unchanged, and every gradient there is 0.

struct BackwardInputs { Acc u0, u1, u2, x, c, dh; };

extern "C" __global__ void sru_backward(
    const REAL* u, const REAL* x, const REAL* v_f, const REAL* v_r, const REAL* b_f, const REAL* b_r,
    const REAL* m, const REAL* cs,    // as in forward
    const REAL* dhs,                  // (T, B, h) or 0
    const REAL* dc_last,              // (B, h) or 0, of the c after each sample's last real step
    const Index* lengths,             // (B,) or 0 for T each
    REAL* du,                         // (T, B, k, h)
    REAL* dx,                         // (T, B, h); not written for k = 4
    REAL* dc0,                        // (B, h)
    Acc* sums,                        // (4, B, h): dv_f, dv_r, db_f, db_r
    double scale, Index is_tanh, Index T, Index B, Index h, Index k) {
    const Index n = thread_number(), Bh = B * h;
    if (n >= Bh) return;
    const Index b = n / h, j = n % h, length = lengths ? lengths[b] : T;
    u += b * k * h + j;
    du += b * k * h + j;
    cs += n;
    const REAL* highway = k == 4 ? u + 3 * h : x + n;
    dx = k == 4 ? du + 3 * h : dx + n;
    const Index highway_step = k == 4 ? Bh * k : Bh;
    const Acc s_x = k == 4 ? 1 : scale;
    const Acc vf = load(v_f, j), vr = load(v_r, j), bf = load(b_f, j), br = load(b_r, j);
    const Acc keep = m ? load(m, n) : Acc(1);
    auto inputs = [=](Index t) {
        const REAL* u_t = u + t * Bh * k;
        return BackwardInputs{load(u_t, 0), load(u_t, h), load(u_t, 2 * h), s_x * load(highway, t * highway_step),
                              load(cs, t * Bh), dhs ? load(dhs, t * Bh + n) : Acc(0)};
    };
    auto write = [=](Index t, Acc du0, Acc du1, Acc du2, Acc dhighway) {
        REAL* du_t = du + t * Bh * k;
        store(du_t, 0, du0);
        store(du_t, h, du1);
        store(du_t, 2 * h, du2);
        store(dx, t * highway_step, s_x * dhighway);
    };
    for (Index t = length; t < T; t++) write(t, 0, 0, 0, 0);
    BackwardInputs next[AHEAD_BACKWARD], now[AHEAD_BACKWARD];
    #pragma unroll
    for (int s = 0; s < AHEAD_BACKWARD; s++)
        if (s < length) next[s] = inputs(length - 1 - s);
    Acc dc = dc_last ? load(dc_last, n) : Acc(0), c_new = load(cs, length * Bh);
    Acc dv_f = 0, dv_r = 0, db_f = 0, db_r = 0;
    for (Index first = 0; first < length; first += AHEAD_BACKWARD) {         // counted from the end
        #pragma unroll
        for (int s = 0; s < AHEAD_BACKWARD; s++) now[s] = next[s];
        #pragma unroll
        for (int s = 0; s < AHEAD_BACKWARD; s++)
            if (first + AHEAD_BACKWARD + s < length) next[s] = inputs(length - 1 - (first + AHEAD_BACKWARD + s));
        #pragma unroll
        for (int s = 0; s < AHEAD_BACKWARD; s++) {
            const Index t = length - 1 - (first + s);
            if (t < 0) break;
            const BackwardInputs in = now[s];
            const Acc f = sigmoid(in.u1 + vf * in.c + bf), r = sigmoid(in.u2 + vr * in.c + br);
            const Acc g = is_tanh ? tanh(c_new) : c_new;
            const Acc e = in.dh * keep * r;
            const Acc du2 = e * (g - in.x) * (1 - r);
            dc += is_tanh ? e * (1 - g * g) : e;
            const Acc du1 = dc * (in.c - in.u0) * f * (1 - f);
            write(t, dc * (1 - f), du1, du2, in.dh - e);
            dv_f += du1 * in.c;
            dv_r += du2 * in.c;
            db_f += du1;
            db_r += du2;
            dc = dc * f + vf * du1 + vr * du2;
            c_new = in.c;
        }
    }
    store(dc0, n, dc);
    sums[n] = dv_f;
    sums[Bh + n] = dv_r;
    sums[2 * Bh + n] = db_f;
    sums[3 * Bh + n] = db_r;
}
