"""For cards with Tensor Cores but without bfloat16: V100, T4, RTX 20xx (compute capability 7.x).

float16 ends at 65,504, so gradients are scaled, and the run steps down to float32 by itself if that is not enough.
On a GPU without Tensor Cores it falls back to float32; on a newer one it works, but bfloat16 would be safer.
"""
config = {
    'use_amp': True,
    'amp_dtype': 'float16',
    'growth_interval': 1000,             # runs are short: try a larger scale twice as often as PyTorch does
}
