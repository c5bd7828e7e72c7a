// Passes over rows of hidden channels, compiled by NVRTC for one width and one set of element types.
//
// Macros: COLUMNS channels of a row; types X of the residual, U of the update, V of the vectors, Y of the result; WARPS
// of a block.

constexpr int N = X == 2 ? 4 : 8;  // elements that a thread takes at a time
constexpr int GROUPS = COLUMNS / N;
constexpr int THREADS = 32 * WARPS;
constexpr int PER_THREAD = (GROUPS + THREADS - 1) / THREADS;
constexpr bool EVEN = GROUPS % THREADS == 0;

// The sum over the block. `partial` must not be read any more by an earlier call: calls take turns with two of them.
__device__ __forceinline__ float block_sum(float x, float* partial) {
    x = lane_sum(x, 32);
    if (WARPS == 1) return x;
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) total += partial[i];
    return total;
}

template <int T>
__device__ __forceinline__ void load_row(Words<T, N> (&row)[PER_THREAD], const void* base, i64 index) {
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const int group = THREADS * i + threadIdx.x;
        if (EVEN || group < GROUPS) row[i].load_once(base, index * GROUPS + group);
    }
}

// A block takes one row after the other and keeps it in registers; the next one is on its way meanwhile.
// x += update * gate[tag], rounded to its type; then y = norm(x) * weight * (1 + scale[tag]) + shift[tag]. `update`,
// `scale`, `shift` and `tags` may be null. Gates lie `gate_stride` elements apart from one tag to the next, scales and
// shifts `stride`. `centred` subtracts the mean first.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_THREADS / THREADS)
    norm_rows(void* x, const void* update, const void* gate, const void* weight, const void* scale, const void* shift,
              const u8* tags, void* y, int rows, i64 gate_stride, i64 stride, float eps, int centred) {
    __shared__ float partial[3][WARPS];
    Words<X, N> next[PER_THREAD];
    Words<U, N> added[PER_THREAD];
    int turn = 0, row = blockIdx.x;
    load_row(next, x, row);
    if (update) load_row(added, update, row);
    while (row < rows) {
        const i64 tag = tags ? tags[row] : 0, gates = tag * (gate_stride / N), vectors = tag * (stride / N);
        Words<X, N> kept[PER_THREAD];
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const int group = THREADS * i + threadIdx.x;
            kept[i] = next[i];
            if (update && (EVEN || group < GROUPS)) {
                Words<V, N> factors;
                float a[N], b[N], c[N];
                factors.load(gate, gates + group);
                kept[i].get(a);
                added[i].get(b);
                factors.get(c);
#pragma unroll
                for (int j = 0; j < N; j++) a[j] += b[j] * c[j];
                kept[i].set(a);
                kept[i].store(x, (i64)row * GROUPS + group);
            }
        }
        const int this_row = row;
        row += gridDim.x;
        if (row < rows) {
            load_row(next, x, row);
            if (update) load_row(added, update, row);
        }
        float mean = 0.f, sum = 0.f;
        if (centred) {
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++) {
                if (EVEN || THREADS * i + threadIdx.x < GROUPS) {
                    float a[N];
                    kept[i].get(a);
#pragma unroll
                    for (int j = 0; j < N; j++) mean += a[j];
                }
            }
            mean = block_sum(mean, partial[2]) / COLUMNS;
        }
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            if (EVEN || THREADS * i + threadIdx.x < GROUPS) {
                float a[N];
                kept[i].get(a);
#pragma unroll
                for (int j = 0; j < N; j++) sum += (a[j] - mean) * (a[j] - mean);
            }
        }
        const float inverse = rsqrtf(block_sum(sum, partial[turn ^= 1]) / COLUMNS + eps);
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const int group = THREADS * i + threadIdx.x;
            if (EVEN || group < GROUPS) {
                Words<V, N> word;
                float a[N], b[N];
                kept[i].get(a);
                word.load(weight, group);
                word.get(b);
#pragma unroll
                for (int j = 0; j < N; j++) a[j] = (a[j] - mean) * inverse * b[j];
                if (scale) {
                    word.load(scale, vectors + group);
                    word.get(b);
#pragma unroll
                    for (int j = 0; j < N; j++) a[j] *= 1.f + b[j];
                }
                if (shift) {
                    word.load(shift, vectors + group);
                    word.get(b);
#pragma unroll
                    for (int j = 0; j < N; j++) a[j] += b[j];
                }
                Words<Y, N> result;
                result.set(a);
                result.store(y, (i64)this_row * GROUPS + group);
            }
        }
    }
}
