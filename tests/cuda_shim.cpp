// The grid of cuda_shim.h, and half precision by hand.

#include "cuda_shim.h"

#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

__thread Dim3 threadIdx, blockIdx;
Dim3 blockDim, gridDim;
static std::barrier<>* barrier;       // of the block that runs; none: its threads run one after another

void __syncthreads() {
    if (!barrier) {
        std::fputs("a kernel without __syncthreads in its own text called it\n", stderr);
        std::abort();
    }
    barrier->arrive_and_wait();
}

// Run body(arguments) for every thread of the blocks first ... of the grid.
extern "C" void launch(void (*body)(void**), void** arguments, int synchronises, const unsigned* grid,
                       const unsigned* block, unsigned first) {
    gridDim = {grid[0], grid[1], 1};
    blockDim = {block[0], block[1], 1};
    const unsigned threads = block[0] * block[1];
    auto run = [=](unsigned thread) {
        threadIdx = {thread % block[0], thread / block[0], 0};
        body(arguments);
    };
    std::barrier<> shared(threads);
    barrier = synchronises ? &shared : nullptr;
    auto blocks = [&](auto each) {
        for (unsigned y = 0; y < grid[1]; y++)
            for (unsigned x = first; x < grid[0]; x++) {
                blockIdx = {x, y, 0};
                each();
            }
    };
    if (!synchronises) {
        blocks([&] { for (unsigned thread = 0; thread < threads; thread++) run(thread); });
        return;
    }
    std::vector<std::thread> team;
    for (unsigned thread = 0; thread < threads; thread++)
        team.emplace_back([&, thread] { blocks([&] { run(thread); shared.arrive_and_wait(); }); });
    for (auto& thread : team) thread.join();
}

float half_to_float(unsigned short bits) {
    const int sign = bits >> 15, exponent = bits >> 10 & 31, fraction = bits & 1023;
    float x = exponent == 0 ? ldexpf(fraction, -24)
            : exponent < 31 ? ldexpf(1024 + fraction, exponent - 25)
            : fraction ? NAN : INFINITY;
    return sign ? -x : x;
}

unsigned short float_to_half(float x) {               // to the nearest, ties to the even one
    const unsigned sign = signbit(x) ? 0x8000 : 0;
    if (isnan(x)) return sign | 0x7e00;
    const float size = fabsf(x);
    if (size >= 65520) return sign | 0x7c00;
    int exponent;
    frexpf(size, &exponent);
    if (size < 6.103515625e-05f) exponent = -13;      // the numbers below the normal ones are spaced like the smallest
    const unsigned units = (unsigned)nearbyintf(ldexpf(size, 11 - exponent));
    return sign | (size < 6.103515625e-05f ? units : (unsigned)((exponent + 13) << 10) + units);
}
