"""For debugging a loss, publishing a baseline, or when in doubt: exact float32, repeatable kernels.

Costs: the time and the memory that mixed precision saves: `python train_unet.py tune` measures them (memory
on a GPU alone).
"""
config = {
    'use_amp': False,                    # float32 throughout
    'tf32_matmul_precision': 'highest',  # exact float32 products, in convolutions too
    'compile_model': False,
    'deterministic': True,               # repeatable kernels, where there are some
}
