// Passes over values of one element type TYPE: the gated activation, and norm with rotation of heads in place.

constexpr int N = TYPE == 2 ? 4 : 8;
constexpr int THREADS = 256;
constexpr int HEAD_THREADS = 128, AT_ONCE = 4;  // of norm_rotate_heads, and heads that a thread has in flight

__device__ __forceinline__ float silu(float x) {
    // the fast forms are exact to about 2^-21 of the result, far below a rounding to 16 bits
    return TYPE == 2 ? x / (1.f + expf(-x)) : __fdividef(x, 1.f + __expf(-x));
}

// x: rows of `groups` groups of value, then as many of gate; out: rows of `groups` groups. A block takes a stripe of
// columns through every gridDim.y-th row.
extern "C" __global__ void __launch_bounds__(THREADS)
    swiglu(const void* x, void* out, i64 rows, int groups) {
    const int group = blockIdx.x * THREADS + threadIdx.x;
    if (group >= groups) return;
#pragma unroll 4
    for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
        Words<TYPE, N> word;
        float value[N], gate[N];
        word.load_once(x, row * 2 * groups + group);
        word.get(value);
        word.load_once(x, row * 2 * groups + groups + group);
        word.get(gate);
#pragma unroll
        for (int i = 0; i < N; i++) value[i] *= silu(gate[i]);
        word.set(value);
        word.store(out, row * groups + group);
    }
}

// x: rows with `heads` heads of `lanes` groups each (a power of two up to 32) at their start, `row_stride` groups apart.
// Every head is divided by its root mean square, then its first 2 * `rotary` groups are turned: a group and the one
// `rotary` groups behind it are the two coordinates. cos, sin: (`tokens`, rotary * N) fp32; row r is token r % tokens.
extern "C" __global__ void __launch_bounds__(HEAD_THREADS)
    norm_rotate_heads(void* x, const float* cos, const float* sin, i64 rows, int heads, int lanes, i64 row_stride,
                      int tokens, int rotary, float eps) {
    const int group = threadIdx.x % lanes, heads_at_once = HEAD_THREADS / lanes;
    const int half = group < rotary ? group : group < 2 * rotary ? group - rotary : -1;
    const int partner = group < rotary ? group + rotary : half < 0 ? group : half;
    const float sign = group < rotary ? -1.f : 1.f;
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        float c[N], s[N];
#pragma unroll
        for (int i = 0; i < N; i++) c[i] = 1.f, s[i] = 0.f;
        if (half >= 0) {
            const int at = row % tokens * rotary + half;
            Words<2, N> angle;
            angle.load(cos, at);
            angle.get(c);
            angle.load(sin, at);
            angle.get(s);
        }
        // whole warps go round together: the shuffles need all lanes
        for (int first = 0; first < heads; first += AT_ONCE * heads_at_once) {
            Words<TYPE, N> word[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const int head = min(first + j * heads_at_once + (int)threadIdx.x / lanes, heads - 1);
                word[j].load_once(x, row * row_stride + head * lanes + group);
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const int head = first + j * heads_at_once + (int)threadIdx.x / lanes;
                float a[N], sum = 0.f;
                word[j].get(a);
#pragma unroll
                for (int i = 0; i < N; i++) sum += a[i] * a[i];
                const float inverse = rsqrtf(lane_sum(sum, lanes) / (lanes * N) + eps);
#pragma unroll
                for (int i = 0; i < N; i++) {
                    a[i] *= inverse;
                    a[i] = a[i] * c[i] + sign * s[i] * __shfl_sync(0xffffffffu, a[i], partner, lanes);
                }
                word[j].set(a);
                if (head < heads) word[j].store(x, row * row_stride + head * lanes + group);
            }
        }
    }
}
