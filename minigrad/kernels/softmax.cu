// The softmax of attention (Vaswani et al. 2017, equation 1; minigrad/functional.py, softmax_attention). A block has one
// row: the scores S_ij of a query i over M keys j. S is (A, H, L, M), its rows first_row ... and its keys first_key ... of
// the whole. The backward is derived in docs/derivations/softmax_attention.md.
//
//     P_ij = exp(S_ij) / sum_j' exp(S_ij')  over the keys that query i sees; 0 for the others, and if it sees none
//
// causal: j <= i + offset; and with a window > 0: j > i + offset - window. mask[a, h, i, j] is found by its strides, 0
// for an axis that is broadcast.

extern "C" __global__ void softmax_forward(
    REAL* S,                          // becomes P
    const bool* mask,                 // or 0
    Index stride_a, Index stride_h, Index stride_i, Index stride_j,
    Index causal, Index first_row, Index first_key, Index offset, Index window, Index H, Index L, Index M) {
    const Index row = blockIdx.x, i = row % L;
    const Index newest = causal ? first_row + i + offset - first_key : M;
    const Index oldest = causal && window ? newest - window + 1 : 0;
    S += row * M;
    if (mask) mask += row / L / H * stride_a + row / L % H * stride_h + i * stride_i;
    auto seen = [=](Index j) { return j >= oldest && j <= newest && (!mask || mask[j * stride_j]); };
    Acc top = -infinity();
    for (Index j = threadIdx.x; j < M; j += blockDim.x)
        if (seen(j)) top = larger(top, load(S, j));
    top = block_largest(top);
    if (top == -infinity()) top = 0;                                         // it sees nothing: every exp is 0
    Acc sum = 0;
    for (Index j = threadIdx.x; j < M; j += blockDim.x)
        if (seen(j)) sum += exp(load(S, j) - top);
    sum = block_sum(sum);
    const Acc scale = 1 / (sum == 0 ? Acc(1) : sum);
    for (Index j = threadIdx.x; j < M; j += blockDim.x)
        store(S, j, seen(j) ? exp(load(S, j) - top) * scale : Acc(0));
}

// dS_ij = P_ij (dP_ij - sum_j' P_ij' dP_ij'), with dP first multiplied by the dropout factors.

extern "C" __global__ void softmax_backward(
    REAL* dP,                         // becomes dS
    const REAL* P,
    const REAL* drop,                 // or 0
    Index M) {
    const Index row = blockIdx.x;
    dP += row * M;
    P += row * M;
    if (drop) drop += row * M;
    auto kept = [=](Index j) { return drop ? load(dP, j) * load(drop, j) : load(dP, j); };
    Acc sum = 0;
    for (Index j = threadIdx.x; j < M; j += blockDim.x) sum += load(P, j) * kept(j);
    sum = block_sum(sum);
    for (Index j = threadIdx.x; j < M; j += blockDim.x) store(dP, j, load(P, j) * (kept(j) - sum));
}
