// What makes CUDA C of minigrad/kernels/*.cu plain C++: the words, the built-in variables, and the launch of a grid.
//
// The threads of a block are fibers where a kernel calls __syncthreads, or, when asked for, threads of the machine with a
// std::barrier; else a loop. Blocks run one after another, so that a __shared__ variable may be a static one.

#pragma once
#include <math.h>                     // libstdc++'s: exp, tanh, sqrt of float and double in the global namespace

#define __global__
#define __device__
#define __shared__ static

struct Dim3 { unsigned x, y, z; };

extern __thread Dim3 threadIdx, blockIdx;
extern Dim3 blockDim, gridDim;

void __syncthreads();
void may_read(const void* address);
float half_to_float(unsigned short bits);
unsigned short float_to_half(float x);
