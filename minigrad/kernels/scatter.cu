// target[ids[n]] += updates[n] for every n (minigrad/layers/embedding.py, scatter_add): the gradient of an embedding.
//
// The ids are sorted, with the indices of their updates. The thread at the first of a run of equal ids has one
// column and adds up the whole run, in the order of the updates: the same numbers give the same sums, which atomic
// additions do not. Blocks along x share the ids, blocks along y the columns.

// One past the last of the ids that equal ids[first].
__device__ inline Index end_of_run(const Index* ids, Index first, Index N) {
    Index low = first + 1, high = N;
    while (low < high) {
        const Index middle = low + (high - low) / 2;
        if (ids[middle] == ids[first]) low = middle + 1;
        else high = middle;
    }
    return low;
}

extern "C" __global__ void scatter_add(
    const Index* ids,                 // (N,) sorted
    const Index* order,               // (N,): ids[n] is the id of updates[order[n]]
    const REAL* updates,              // (N, d)
    REAL* target,                     // (V, d)
    Index N, Index d) {
    const Index first = (Index)blockIdx.x * blockDim.y + threadIdx.y;
    const Index j = (Index)blockIdx.y * blockDim.x + threadIdx.x;
    if (first >= N || j >= d || (first > 0 && ids[first - 1] == ids[first])) return;
    const Index end = end_of_run(ids, first, N), entry = ids[first] * d + j;
    Acc sum = 0;
    #pragma unroll 8
    for (Index n = first; n < end; n++) sum += load(updates, order[n] * d + j);
    store(target, entry, load(target, entry) + sum);
}
