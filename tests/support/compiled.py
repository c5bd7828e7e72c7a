"""Triton kernels compiled for GPUs that need not be here."""

# triton has no wheels but for Linux
# pyright: reportMissingImports=false


def compile_to_yuv420(capability: int) -> str:
    """PTX of the conversion to 4:2:0 for a compute capability such as 90, with alignments as the decoder has them."""
    import triton
    from rushes_kernels import picture_triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = picture_triton._to_yuv420_kernel
    names = kernel.arg_names
    aligned = {"frames_ptr": "*fp32", "out_ptr": "*u8", "H": "i32", "W": "i32", "colour_stride": "i32"}
    signature = dict.fromkeys(names, "fp32") | aligned | {"COLUMNS": "constexpr"}
    source = ASTSource(
        kernel,
        signature,
        {(names.index("COLUMNS"),): picture_triton._COLUMNS},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=picture_triton.OPTIONS)
    return compiled.asm["ptx"]
