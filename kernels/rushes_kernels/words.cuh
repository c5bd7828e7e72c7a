// Elements of a type (0 bf16, 1 fp16, 2 fp32) as the floats of one thread. Put in front of a source by nvrtc.py.

typedef unsigned int u32;
typedef unsigned char u8;
typedef long long i64;

__device__ __forceinline__ void widen_pair(int type, u32 pair, float& low, float& high) {
    if (type == 0) {
        low = __uint_as_float(pair << 16);
        high = __uint_as_float(pair & 0xffff0000u);
    } else {
        asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
            : "=f"(low), "=f"(high)
            : "r"(pair));
    }
}

__device__ __forceinline__ u32 narrow_pair(int type, float low, float high) {
    u32 pair;
    if (type == 0)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// `N` neighbouring elements of a type in 32-bit parts: 4 or 8 elements, 8, 16 or 32 bytes
template <int T, int N>
struct Words {
    static constexpr int PARTS = T == 2 ? N : N / 2;
    u32 part[PARTS];

    // index counts groups of N elements
    __device__ __forceinline__ void load(const void* base, i64 index) {
        const u32* at = (const u32*)base + index * PARTS;
        if constexpr (PARTS == 2) {
            const uint2 two = __ldg((const uint2*)at);
            part[0] = two.x, part[1] = two.y;
        } else {
#pragma unroll
            for (int i = 0; i < PARTS; i += 4) {
                const uint4 four = __ldg((const uint4*)(at + i));
                part[i] = four.x, part[i + 1] = four.y, part[i + 2] = four.z, part[i + 3] = four.w;
            }
        }
    }

    // for what is read once: it should not displace what is read again
    __device__ __forceinline__ void load_once(const void* base, i64 index) {
        const u32* at = (const u32*)base + index * PARTS;
        if constexpr (PARTS == 2) {
            const uint2 two = __ldcs((const uint2*)at);
            part[0] = two.x, part[1] = two.y;
        } else {
#pragma unroll
            for (int i = 0; i < PARTS; i += 4) {
                const uint4 four = __ldcs((const uint4*)(at + i));
                part[i] = four.x, part[i + 1] = four.y, part[i + 2] = four.z, part[i + 3] = four.w;
            }
        }
    }

    __device__ __forceinline__ void store(void* base, i64 index) const {
        u32* at = (u32*)base + index * PARTS;
        if constexpr (PARTS == 2) {
            *(uint2*)at = make_uint2(part[0], part[1]);
        } else {
#pragma unroll
            for (int i = 0; i < PARTS; i += 4)
                *(uint4*)(at + i) = make_uint4(part[i], part[i + 1], part[i + 2], part[i + 3]);
        }
    }

    // for what should not displace what is read again
    __device__ __forceinline__ void store_once(void* base, i64 index) const {
        u32* at = (u32*)base + index * PARTS;
        if constexpr (PARTS == 2) {
            __stcs((uint2*)at, make_uint2(part[0], part[1]));
        } else {
#pragma unroll
            for (int i = 0; i < PARTS; i += 4)
                __stcs((uint4*)(at + i), make_uint4(part[i], part[i + 1], part[i + 2], part[i + 3]));
        }
    }

    __device__ __forceinline__ void get(float (&x)[N]) const {
        if constexpr (T == 2) {
#pragma unroll
            for (int i = 0; i < N; i++) x[i] = __uint_as_float(part[i]);
        } else {
#pragma unroll
            for (int i = 0; i < N / 2; i++) widen_pair(T, part[i], x[2 * i], x[2 * i + 1]);
        }
    }

    __device__ __forceinline__ void set(const float (&x)[N]) {
        if constexpr (T == 2) {
#pragma unroll
            for (int i = 0; i < N; i++) part[i] = __float_as_uint(x[i]);
        } else {
#pragma unroll
            for (int i = 0; i < N / 2; i++) part[i] = narrow_pair(T, x[2 * i], x[2 * i + 1]);
        }
    }
};

__device__ __forceinline__ float lane_sum(float x, int lanes) {
    for (int apart = lanes / 2; apart; apart /= 2) x += __shfl_xor_sync(0xffffffffu, x, apart);
    return x;
}
