// Linear layers with what follows them for sm_90a, compiled by NVRTC behind hopper_product.cuh. Two kernels:
//
//     gated_linear    (x V^T + v) * SiLU(x G^T + g), V and G being the upper and the lower half of the weight
//     project_heads   x W^T + b in heads of 64 channels, the first of which are normed and rotated
//
// Of `gated_linear` the two halves of a unit's columns are COLUMNS of V and the same of G, so that a thread ends up with both
// factors of what it writes.

// ---- gated_linear

struct Gate {
    Staging out;
    const u32* bias;
    int width;
    u32 value_bias[COLUMNS / 8], gate_bias[COLUMNS / 8];

    __device__ __forceinline__ void prepare(int, int column) {
        const u32* words = bias + column / 2 + out.lane % 4;
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; i++) {
            value_bias[i] = bias ? words[4 * i] : 0;
            gate_bias[i] = bias ? words[width / 2 + 4 * i] : 0;
        }
    }
    __device__ __forceinline__ void finish(const float (&sums)[COLUMNS], int row, int column) {
        out.begin();
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; i += 2) {
            u32 word[2][2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float v[2], g[2];
                unpack(value_bias[i + j], v);
                unpack(gate_bias[i + j], g);
                const float *value = sums + 4 * (i + j), *gate = value + COLUMNS / 2;
#pragma unroll
                for (int r = 0; r < 2; r++)
                    word[j][r] = pack(gated(value[2 * r] + v[0], gate[2 * r] + g[0]),
                                      gated(value[2 * r + 1] + v[1], gate[2 * r + 1] + g[1]));
            }
            out.put(i, word);
        }
        out.store(row, column);
    }
};

// x: (rows, depth), weight: (2 * width, depth), out: (rows, width) as tensor maps of 128, 128 and 64 rows by 64
// channels; bias: 2 * width as words of two columns, or null. depth >= LAG * DEPTH, width a multiple of COLUMNS.
// arrived: 0.
extern "C" __global__ void __launch_bounds__(128 * (1 + GROUP), 1) __cluster_dims__(CLUSTER, 1, 1)
    gated_linear(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
                 const __grid_constant__ TensorMap out, const __grid_constant__ Shape shape, int* arrived,
                 const u32* bias) {
    extern __shared__ int scratch[];
    const u32 slots = first_slot(scratch), staging = slots + STAGES * SLOT_BYTES;
    Gate gate = {Staging(&out, staging), bias, shape.width};
    multiply_rows(slots, staging + GROUP * OUT_BYTES, &x, &weight, shape, arrived, gate);
}

// ---- project_heads

constexpr int HEAD = 64;
// An angle turns a column and the one ANGLES further: both are a thread's own, as ANGLES is a multiple of 8.
constexpr int TURNED = ANGLES / 8;

struct Heads {
    Staging out;
    const u32* bias;
    const float2 *cos, *sin;
    int tokens, num_normed;
    float eps;
    float2 c[2][TURNED], s[2][TURNED];

    __device__ __forceinline__ void prepare(int row, int) {
        const int first = row + threadIdx.x % 128 / 32 * 16 + out.lane / 4;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int at = (first + 8 * r) % tokens * (ANGLES / 2) + out.lane % 4;
#pragma unroll
            for (int i = 0; i < TURNED; i++) c[r][i] = cos[at + 4 * i], s[r][i] = sin[at + 4 * i];
        }
    }
    // a row's columns of a head, as pairs of every eight
    __device__ __forceinline__ void norm_rotate(float (&x)[HEAD / 8][2], int r) const {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < HEAD / 8; i++) sum += x[i][0] * x[i][0] + x[i][1] * x[i][1];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float inverse = rsqrtf(sum / HEAD + eps);
#pragma unroll
        for (int i = 0; i < HEAD / 8; i++) x[i][0] *= inverse, x[i][1] *= inverse;
#pragma unroll
        for (int i = 0; i < TURNED; i++) {
            const float cosines[2] = {c[r][i].x, c[r][i].y}, sines[2] = {s[r][i].x, s[r][i].y};
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float low = x[i][j], high = x[i + TURNED][j];
                x[i][j] = low * cosines[j] - high * sines[j];
                x[i + TURNED][j] = high * cosines[j] + low * sines[j];
            }
        }
    }
    __device__ __forceinline__ void finish(const float (&sums)[COLUMNS], int row, int column) {
        const u32* words = bias + column / 2 + out.lane % 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            out.begin();
#pragma unroll
            for (int head = 0; head < COLUMNS / HEAD; head++) {
                const int group = (half * COLUMNS + head * HEAD) / 8;
                u32 word[HEAD / 8][2];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float x[HEAD / 8][2];
#pragma unroll
                    for (int i = 0; i < HEAD / 8; i++) {
                        float b[2];
                        unpack(words[4 * (group + i)], b);
                        x[i][0] = sums[4 * (group + i) + 2 * r] + b[0];
                        x[i][1] = sums[4 * (group + i) + 2 * r + 1] + b[1];
                    }
                    if (column / HEAD + group / 8 < num_normed) norm_rotate(x, r);
#pragma unroll
                    for (int i = 0; i < HEAD / 8; i++) word[i][r] = pack(x[i][0], x[i][1]);
                }
#pragma unroll
                for (int i = 0; i < HEAD / 8; i += 2) {
                    const u32 two[2][2] = {{word[i][0], word[i][1]}, {word[i + 1][0], word[i + 1][1]}};
                    out.put(head * (HEAD / 8) + i, two);
                }
            }
            out.store(row, column + half * COLUMNS);
        }
    }
};

// x: (rows, depth), weight: (width, depth), out: (rows, width) as tensor maps of 128, 128 and 64 rows by 64 channels;
// bias: width as words of two columns; cos, sin: (tokens, ANGLES) fp32, row r being token r % tokens.
// depth >= LAG * DEPTH, width a multiple of 2 * COLUMNS. arrived: 0.
extern "C" __global__ void __launch_bounds__(128 * (1 + GROUP), 1) __cluster_dims__(CLUSTER, 1, 1)
    project_heads(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
                  const __grid_constant__ TensorMap out, const __grid_constant__ Shape shape, int* arrived,
                  const u32* bias, const float2* cos, const float2* sin, int tokens, int num_normed, float eps) {
    extern __shared__ int scratch[];
    const u32 slots = first_slot(scratch), staging = slots + STAGES * SLOT_BYTES;
    Heads heads = {Staging(&out, staging), bias, cos, sin, tokens, num_normed, eps};
    multiply_rows(slots, staging + GROUP * OUT_BYTES, &x, &weight, shape, arrived, heads);
}
