// What all kernels use. The loader puts this text before each .cu file and compiles the two together with
//
//     -DREAL=float | double | Half        the type of the arrays
//
// Nothing is included, so that one text compiles under NVRTC (which CuPy uses), nvcc, and g++ (with
// tests/support/cuda_shim.h).

typedef long long Index;              // every offset and size: 2^31 numbers are 8 GB, which a GPU has

struct Half { unsigned short bits; };

template <class Real> struct Sum { typedef Real type; };
template <> struct Sum<Half> { typedef float type; };
typedef Sum<REAL>::type Acc;          // of all arithmetic: float for Half and float, double for double

const int MOST_THREADS = 256;         // of a block that computes a sum

// ---- numbers -------------------------------------------------------------------------------------------------

#ifdef __CUDACC__                     // by two instructions, which is what cuda_fp16.h does
__device__ inline float half_to_float(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

__device__ inline unsigned short float_to_half(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
#endif

__device__ inline float load(const float* a, Index i) { return a[i]; }
__device__ inline double load(const double* a, Index i) { return a[i]; }
__device__ inline float load(const Half* a, Index i) { return half_to_float(a[i].bits); }

__device__ inline void store(float* a, Index i, float x) { a[i] = x; }
__device__ inline void store(double* a, Index i, double x) { a[i] = x; }
__device__ inline void store(Half* a, Index i, float x) { a[i].bits = float_to_half(x); }

// 1 / (1 + exp(-z)); exp(-z) = inf gives 0, as it should be.
__device__ inline Acc sigmoid(Acc z) { return 1 / (1 + exp(-z)); }

__device__ inline Acc infinity() { return -log(Acc(0)); }

template <class T> __device__ inline T larger(T a, T b) { return a > b || a != a ? a : b; }      // NaN if one is

// ---- threads -------------------------------------------------------------------------------------------------

// The index of this thread among all threads along x.
__device__ inline Index thread_number() { return (Index)blockIdx.x * blockDim.x + threadIdx.x; }

// The sum (the largest) of x over the threads of a block, given to each of them; their number is a power of two. The
// order of the additions is fixed: the same numbers give the same sum.
template <class T, class Join> __device__ inline T block_join(T x, Join join) {
    __shared__ T parts[MOST_THREADS];
    parts[threadIdx.x] = x;
    __syncthreads();
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) parts[threadIdx.x] = join(parts[threadIdx.x], parts[threadIdx.x + half]);
        __syncthreads();
    }
    const T all = parts[0];
    __syncthreads();                  // all have read it before anyone writes again
    return all;
}

template <class T> __device__ inline T block_sum(T x) {
    return block_join(x, [](T a, T b) { return a + b; });
}

template <class T> __device__ inline T block_largest(T x) {
    return block_join(x, [](T a, T b) { return larger(a, b); });
}
