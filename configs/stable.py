"""For debugging a loss, publishing a baseline, or when in doubt: nothing that could round or reorder.

Costs: the time and the memory that mixed precision saves: `python train_unet.py tune` measures them.
"""
config = {
    'use_amp': False,                    # float32 throughout
    'tf32_matmul_precision': 'highest',  # exact float32 products, in convolutions too
    'compile_model': False,
    'deterministic': True,               # repeatable kernels, where there are some
}
