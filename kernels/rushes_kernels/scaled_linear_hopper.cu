// Linear layers of e4m3 rows and weights for sm_90a, compiled by NVRTC behind hopper_product.cuh with SCALED. A product of row
// r and column c counts times row_scales[r] * column_scales[c]. Two kernels:
//
//     scaled_gated_linear   value * SiLU(gate), the upper and the lower half of the weight's rows; a unit has COLUMNS of both
//     scaled_linear         the products

struct Scales {
    const float *of_rows, *of_columns;
    int rows;
    float row[2];  // of a thread's rows

    __device__ __forceinline__ void prepare(int first, int lane) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int at = first + threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * r;
            row[r] = at < rows ? of_rows[at] : 0.f;
        }
    }
    // of a thread's two columns of the eight from `column` on
    __device__ __forceinline__ float2 columns(int column, int lane) const {
        return __ldg((const float2*)(of_columns + column) + lane % 4);
    }
};

struct ScaledGate {
    Staging out;
    Scales scales;
    int width;

    __device__ __forceinline__ void prepare(int row, int) { scales.prepare(row, out.lane); }
    __device__ __forceinline__ void finish(const float (&sums)[COLUMNS], int row, int column) {
        out.begin();
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; i += 2) {
            u32 word[2][2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float2 v = scales.columns(column + 8 * (i + j), out.lane);
                const float2 g = scales.columns(width + column + 8 * (i + j), out.lane);
                const float *value = sums + 4 * (i + j), *gate = value + COLUMNS / 2;
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const float s = scales.row[r];
                    word[j][r] = pack(gated(value[2 * r] * (s * v.x), gate[2 * r] * (s * g.x)),
                                      gated(value[2 * r + 1] * (s * v.y), gate[2 * r + 1] * (s * g.y)));
                }
            }
            out.put(i, word);
        }
        out.store(row, column);
    }
};

struct Scale {
    Staging out;
    Scales scales;

    __device__ __forceinline__ void prepare(int row, int) { scales.prepare(row, out.lane); }
    __device__ __forceinline__ void finish(const float (&sums)[COLUMNS], int row, int column) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            out.begin();
#pragma unroll
            for (int i = 0; i < COLUMNS / 8; i += 2) {
                u32 word[2][2];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int group = half * (COLUMNS / 8) + i + j;
                    const float2 c = scales.columns(column + 8 * group, out.lane);
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const float s = scales.row[r];
                        word[j][r] = pack(sums[4 * group + 2 * r] * (s * c.x), sums[4 * group + 2 * r + 1] * (s * c.y));
                    }
                }
                out.put(i, word);
            }
            out.store(row, column + half * COLUMNS);
        }
    }
};

// x: (rows, depth), weight: (2 * width, depth) as tensor maps of 128 rows by 128 channels, out: (rows, width) of 64 rows by
// 64 channels; row_scales: rows, column_scales: 2 * width. depth >= LAG * DEPTH, width a multiple of COLUMNS. arrived: 0.
extern "C" __global__ void __launch_bounds__(128 * (1 + GROUP), 1) __cluster_dims__(CLUSTER, 1, 1)
    scaled_gated_linear(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
                        const __grid_constant__ TensorMap out, const __grid_constant__ Shape shape, int* arrived,
                        const float* row_scales, const float* column_scales) {
    extern __shared__ int scratch[];
    const u32 slots = first_slot(scratch), staging = slots + STAGES * SLOT_BYTES;
    ScaledGate gate = {Staging(&out, staging), {row_scales, column_scales, shape.rows}, shape.width};
    multiply_rows(slots, staging + GROUP * OUT_BYTES, &x, &weight, shape, arrived, gate);
}

// weight: (width, depth), column_scales: width, a multiple of 2 * COLUMNS; everything else as above.
extern "C" __global__ void __launch_bounds__(128 * (1 + GROUP), 1) __cluster_dims__(CLUSTER, 1, 1)
    scaled_linear(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
                  const __grid_constant__ TensorMap out, const __grid_constant__ Shape shape, int* arrived,
                  const float* row_scales, const float* column_scales) {
    extern __shared__ int scratch[];
    const u32 slots = first_slot(scratch), staging = slots + STAGES * SLOT_BYTES;
    Scale scale = {Staging(&out, staging), {row_scales, column_scales, shape.rows}};
    multiply_rows(slots, staging + GROUP * OUT_BYTES, &x, &weight, shape, arrived, scale);
}
