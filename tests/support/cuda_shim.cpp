// The grid of cuda_shim.h, and half precision by hand.

#include "cuda_shim.h"

#include <ucontext.h>

#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

__thread Dim3 threadIdx, blockIdx;
Dim3 blockDim, gridDim;
static void (*wait_for_the_block)();  // none: the kernel's own text has no __syncthreads
static bool backwards;                // the last block first, and the last thread of each

// ---- what may be read ----------------------------------------------------------------------------------------

static const void** ends;             // the beginning and the end of each array of a launch; none: anything may be read
static int arrays;
static bool read_outside;

void may_read(const void* address) {
    for (int n = 0; n < arrays; n++)
        if (address >= ends[2 * n] && address < ends[2 * n + 1]) return;
    if (arrays) read_outside = true;
}

extern "C" void may_read_between(const void** of_arrays, int count) {
    ends = of_arrays;
    arrays = count;
    read_outside = false;
}

extern "C" int has_read_outside() { return read_outside; }

// ---- the grid ------------------------------------------------------------------------------------------------

static void fail(const char* sentence) {
    std::fprintf(stderr, "%s\n", sentence);
    std::abort();
}

void __syncthreads() {
    if (!wait_for_the_block) fail("a kernel without __syncthreads in its own text called it");
    wait_for_the_block();
}

static void be_thread(unsigned n) { threadIdx = {n % blockDim.x, n / blockDim.x, 0}; }

static unsigned place(unsigned i, unsigned n, bool turned) { return turned ? n - 1 - i : i; }

template <class Each> static void for_each_block(unsigned first, Each each) {
    for (unsigned y = 0; y < gridDim.y; y++)
        for (unsigned x = first; x < gridDim.x; x++) {
            blockIdx = {place(x - first, gridDim.x - first, backwards) + first, place(y, gridDim.y, backwards), 0};
            each();
        }
}

// ---- the threads of a block as fibers of one thread ----------------------------------------------------------
// They take turns at each __syncthreads, up and down in turn: what a missing one breaks is broken at every run.

const size_t STACK = 1 << 16;
struct Fiber { ucontext_t context; std::vector<char> stack = std::vector<char>(STACK); bool waits; };
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static Fiber* current;
static void (*fiber_body)(void**);
static void** fiber_arguments;

static void yield_fiber() {
    current->waits = true;
    swapcontext(&current->context, &scheduler);
}

static void run_fiber() { fiber_body(fiber_arguments); }         // then the scheduler goes on (uc_link)

static void run_block_of_fibers(unsigned threads) {
    for (unsigned n = 0; n < threads; n++) {
        ucontext_t& context = fibers[n].context;
        getcontext(&context);
        context.uc_stack.ss_sp = fibers[n].stack.data();
        context.uc_stack.ss_size = STACK;
        context.uc_link = &scheduler;
        makecontext(&context, run_fiber, 0);
    }
    for (unsigned round = 0, waiting = threads; waiting; round++) {
        waiting = 0;
        for (unsigned i = 0; i < threads; i++) {
            const unsigned n = place(i, threads, (round + backwards) % 2);
            current = &fibers[n];
            current->waits = false;
            be_thread(n);
            swapcontext(&scheduler, &current->context);
            waiting += current->waits;
        }
        if (waiting && waiting < threads) fail("some threads of a block wait in __syncthreads, others have ended");
    }
}

// ---- a thread of the machine for each thread of a block ------------------------------------------------------

static std::barrier<>* barrier;

static void run_threads(void (*body)(void**), void** arguments, unsigned threads, unsigned first) {
    std::barrier<> shared(threads);
    barrier = &shared;
    wait_for_the_block = [] { barrier->arrive_and_wait(); };
    std::vector<std::thread> team;
    for (unsigned n = 0; n < threads; n++)
        team.emplace_back([&, n] {
            be_thread(n);
            for_each_block(first, [&] { body(arguments); shared.arrive_and_wait(); });
        });
    for (auto& thread : team) thread.join();
}

// Run body(arguments) for every thread of the blocks first ... of the grid. how: 0, one thread after another, for a
// kernel that does not synchronise; 1, fibers; 2, threads and a barrier. turned: in the opposite order.
extern "C" void launch(void (*body)(void**), void** arguments, int how, const unsigned* grid, const unsigned* block,
                       unsigned first, int turned) {
    gridDim = {grid[0], grid[1], 1};
    blockDim = {block[0], block[1], 1};
    const unsigned threads = block[0] * block[1];
    backwards = turned;
    wait_for_the_block = nullptr;
    if (how == 2) return run_threads(body, arguments, threads, first);
    if (how == 1) {
        if (fibers.size() < threads) fibers.resize(threads);
        wait_for_the_block = yield_fiber;
        fiber_body = body;
        fiber_arguments = arguments;
    }
    for_each_block(first, [=] {
        if (how == 1) return run_block_of_fibers(threads);
        for (unsigned n = 0; n < threads; n++) {
            be_thread(place(n, threads, backwards));
            body(arguments);
        }
    });
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
