// Layer normalisation (Ba et al. 2016, arXiv 1607.06450; minigrad/layers/norm.py). A block has one row of d numbers. The
// backward is derived in docs/derivations/layer_norm.md.
//
//     mu = mean(x);   sigma = sqrt(mean((x - mu)^2) + eps);   x_hat = (x - mu) / sigma;   y = x_hat gain + bias

extern "C" __global__ void norm_forward(
    const REAL* x, const REAL* gain, const REAL* bias, REAL* y, Acc* mu, Acc* inverse_sigma, double eps, Index d) {
    const Index row = blockIdx.x;
    x += row * d;
    y += row * d;
    Acc sum = 0;
    for (Index j = threadIdx.x; j < d; j += blockDim.x) sum += load(x, j);
    const Acc mean = block_sum(sum) / d;
    sum = 0;
    for (Index j = threadIdx.x; j < d; j += blockDim.x) sum += (load(x, j) - mean) * (load(x, j) - mean);
    const Acc scale = 1 / sqrt(block_sum(sum) / d + Acc(eps));
    for (Index j = threadIdx.x; j < d; j += blockDim.x)
        store(y, j, (load(x, j) - mean) * scale * load(gain, j) + load(bias, j));
    if (threadIdx.x == 0) {
        mu[row] = mean;
        inverse_sigma[row] = scale;
    }
}

// dx = (dx_hat - mean(dx_hat) - x_hat mean(dx_hat x_hat)) / sigma,  dx_hat = dy gain

extern "C" __global__ void norm_backward(
    const REAL* dy, const REAL* x, const REAL* gain, const Acc* mu, const Acc* inverse_sigma, REAL* dx, Index d) {
    const Index row = blockIdx.x;
    const Acc mean = mu[row], scale = inverse_sigma[row];
    dy += row * d;
    x += row * d;
    dx += row * d;
    Acc sum = 0, along = 0;
    for (Index j = threadIdx.x; j < d; j += blockDim.x) {
        const Acc dx_hat = load(dy, j) * load(gain, j);
        sum += dx_hat;
        along += dx_hat * (load(x, j) - mean) * scale;
    }
    const Acc mean_dx_hat = block_sum(sum) / d, mean_along = block_sum(along) / d;
    for (Index j = threadIdx.x; j < d; j += blockDim.x) {
        const Acc x_hat = (load(x, j) - mean) * scale;
        store(dx, j, (load(dy, j) * load(gain, j) - mean_dx_hat - x_hat * mean_along) * scale);
    }
}

// dgain = sum dy x_hat and dbias = sum dy over the rows. A block of 32 x 8 threads has 32 columns and a share of the
// rows; it writes its part to sums[0, blockIdx.y] and sums[1, blockIdx.y], (2, gridDim.y, d). The caller adds them.

const int COLUMNS = 32, ROWS = 8;

extern "C" __global__ void norm_backward_sums(
    const REAL* dy, const REAL* x, const Acc* mu, const Acc* inverse_sigma, Acc* sums, Index rows, Index d) {
    __shared__ Acc gains[ROWS][COLUMNS];
    __shared__ Acc biases[ROWS][COLUMNS];
    const Index j = thread_number(), stride = (Index)gridDim.y * ROWS;
    Acc dgain = 0, dbias = 0;
    if (j < d)
        for (Index row = (Index)blockIdx.y * ROWS + threadIdx.y; row < rows; row += stride) {
            const Acc g = load(dy, row * d + j);
            dgain += g * (load(x, row * d + j) - mu[row]) * inverse_sigma[row];
            dbias += g;
        }
    gains[threadIdx.y][threadIdx.x] = dgain;
    biases[threadIdx.y][threadIdx.x] = dbias;
    __syncthreads();
    if (threadIdx.y > 0 || j >= d) return;
    for (unsigned i = 1; i < ROWS; i++) {
        dgain += gains[i][threadIdx.x];
        dbias += biases[i][threadIdx.x];
    }
    sums[(Index)blockIdx.y * d + j] = dgain;
    sums[((Index)gridDim.y + blockIdx.y) * d + j] = dbias;
}
