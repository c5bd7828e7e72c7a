// Passes behind the video decoder, compiled by NVRTC behind words.cuh: patches of overlapping tiles to a canvas, and
// frames to pixels. TYPE: of patches.

constexpr int THREADS = 256, N = 8;
constexpr int MAX_STARTS = 32;  // of tiles along an axis

// Where the tiles of a canvas start, and what lies in one: tokens of x patches in y rows in t frames, and some behind
// them that are none; a patch is `colours` x `depth` frames x `step` x `step` pixels.
struct Tiles {
    int rows, columns, tops[MAX_STARTS], lefts[MAX_STARTS];
    int height, width, tokens, colours, depth, step;

    // the N pixels from (y, x) on of a frame of a colour, in a tile
    __device__ void load(float (&pixels)[N], const void* patches, int row, int column, int colour, int frame, int y,
                         int x) const {
        y -= tops[row], x -= lefts[column];
        const i64 tile = row * columns + column;
        const int token = (frame / depth * (height / step) + y / step) * (width / step) + x / step;
        const int line = ((colour * depth + frame % depth) * step + y % step) * step + x % step;
        Words<TYPE, N> word;
        word.load(patches, ((tile * tokens + token) * ((i64)colours * depth * step * step) + line) / N);
        word.get(pixels);
    }
};

// as torch.lerp, from `before` to `pixels`
__device__ __forceinline__ void fade(float (&pixels)[N], const float (&before)[N], const float (&weight)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float difference = pixels[i] - before[i];
        pixels[i] = weight[i] < .5f ? before[i] + weight[i] * difference : pixels[i] - difference * (1.f - weight[i]);
    }
}

// canvas: (colours, frames, height, width) fp32; a block takes `step` lines of one frame of one colour. All of these lie
// in one row of tiles: that from whose start on no later one has started.
extern "C" __global__ void __launch_bounds__(THREADS)
    stitch_patches(const void* patches, float* canvas, const __grid_constant__ Tiles tiles, int frames, int height,
                   int width) {
    const int first = blockIdx.x * tiles.step, frame = blockIdx.y, colour = blockIdx.z;
    int row = 0;
    while (row + 1 < tiles.rows && tiles.tops[row + 1] <= first) row++;
    const int overlap_above = row ? tiles.tops[row - 1] + tiles.height - tiles.tops[row] : 0;
    const int groups = width / N;
    for (int i = threadIdx.x; i < tiles.step * groups; i += THREADS) {
        const int y = first + i / groups, x = i % groups * N;
        int column = 0;
        while (column + 1 < tiles.columns && tiles.lefts[column + 1] <= x) column++;
        const int overlap_left = column ? tiles.lefts[column - 1] + tiles.width - tiles.lefts[column] : 0;
        const int down = y - tiles.tops[row], along = x - tiles.lefts[column];
        float pixels[N], before[N], weight[N];
        tiles.load(pixels, patches, row, column, colour, frame, y, x);
        if (down < overlap_above) {
            tiles.load(before, patches, row - 1, column, colour, frame, y, x);
#pragma unroll
            for (int j = 0; j < N; j++) weight[j] = (float)down / overlap_above;
            fade(pixels, before, weight);
        }
        if (along < overlap_left) {
            tiles.load(before, patches, row, column - 1, colour, frame, y, x);
#pragma unroll
            for (int j = 0; j < N; j++) weight[j] = (float)(along + j) / overlap_left;
            fade(pixels, before, weight);
        }
        Words<2, N> word;
        word.set(pixels);
        word.store(canvas, (((i64)colour * frames + frame) * height + y) * groups + x / N);
    }
}

// frames: three planes of `count` values, `stride` apart; pixels: the bytes of count pixels. Four pixels a thread. A value
// is scaled, moved, held in 0..1 and rounded to 255 steps, each as PyTorch rounds it.
struct Colours {
    float scale[3], shift[3];
};
extern "C" __global__ void __launch_bounds__(THREADS)
    to_pixels(const float* frames, u32* pixels, i64 count, i64 stride, const __grid_constant__ Colours colours) {
    const i64 at = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (at * 4 >= count) return;
    u32 bytes[12];
#pragma unroll
    for (int colour = 0; colour < 3; colour++) {
        Words<2, 4> word;
        float values[4];
        word.load_once(frames + colour * stride, at);
        word.get(values);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float value = __fadd_rn(__fmul_rn(values[i], colours.scale[colour]), colours.shift[colour]);
            bytes[3 * i + colour] = __float2int_rn(fminf(fmaxf(value, 0.f), 1.f) * 255.f);
        }
    }
#pragma unroll
    for (int i = 0; i < 3; i++)
        __stcs(pixels + at * 3 + i,
               bytes[4 * i] | bytes[4 * i + 1] << 8 | bytes[4 * i + 2] << 16 | bytes[4 * i + 3] << 24);
}
