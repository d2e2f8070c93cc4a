"""For debugging a loss, publishing a baseline, or when in doubt: nothing that could round or reorder.

Costs: two to three times the time and about twice the memory of mixed precision on a GPU.
"""
config = {
    'use_amp': False,                    # float32 throughout
    'tf32_matmul_precision': 'highest',  # exact float32 products, in convolutions too
    'compile_model': False,
    'deterministic': True,               # repeatable kernels only
}
