"""For a GPU with Tensor Cores and a run that is longer than the compiling.

Costs: one to two minutes of compiling before the first step; repeatable only within GPU rounding. On a single NVIDIA
GPU the compiled code runs as CUDA graphs (not with a network or loss of your own, activation_checkpointing,
progressive_resizing, or ema_decay=None where images are not resized): these keep the memory of a step, and validation
needs its own beside it.
On a CPU it resolves to what the CPU is good at, compiled. Whether compiling pays back on your machine
`python train_unet.py tune` measures.
"""
config = {
    'use_amp': 'auto',                 # bfloat16 where native, else float16 with a scaler, else float32
    'tf32_matmul_precision': 'high',   # for what stays in float32
    'compile_model': True,             # worth it when the run is longer than the compiling
    'batch_size': 16,                  # fills a GPU better than 8; the learning rate follows, the epochs stay
}
