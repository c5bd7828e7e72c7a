// What kernels for sm_90a have in common: barriers in shared memory, products of warpgroups, pairs of 16-bit values. Put in
// front of a source by nvrtc.py.
//
// Macros: TYPE 0 bf16, 1 fp16.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
struct alignas(64) TensorMap {
    u64 opaque[16];
};

#if TYPE == 0
#define ELEMENT "bf16"
#else
#define ELEMENT "f16"
#endif
constexpr int ROWS = 64;  // of a warpgroup's product

__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier, int arrivals) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive_if(u32 barrier, bool condition) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %1, 0; @p mbarrier.arrive.shared.b64 _, [%0]; }" ::"r"(barrier),
                 "r"((int)condition)
                 : "memory");
}
// With the time hint the waiting warp sleeps; without it, it takes issue slots from the others.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred p;\n"
        "again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1, 0x989680;\n"
        "@p bra done;\n"
        "bra again;\n"
        "done: }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// until no more than N of the groups of products committed are in flight
template <int N = 0>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// The compiler must neither move nor copy accumulators while products are in flight.
template <int N>
__device__ __forceinline__ void pin(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 packed;
    asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
__device__ __forceinline__ void unpack(u32 packed, float (&x)[2]) {
#if TYPE == 0
    x[0] = __uint_as_float(packed << 16), x[1] = __uint_as_float(packed & 0xffff0000u);
#else
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }" : "=f"(x[0]), "=f"(x[1]) : "r"(packed));
#endif
}

// Shared-memory descriptors: 8 rows of 128 bytes lie 1024 bytes apart, with the 128-byte swizzle. `low` is an address >> 4,
// to which constants are added; operands are K-major with K_MAJOR in it.
constexpr u32 DESCRIPTOR_HIGH = 64u | 1u << 30, K_MAJOR = 1u << 16;
__device__ __forceinline__ u64 descriptor(u32 low) { return (u64)DESCRIPTOR_HIGH << 32 | low; }

#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
#define P16_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define P16_1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define P16_2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define P16_3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
