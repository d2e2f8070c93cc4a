"""To see soon whether code and data work (some hundred images take a minute); the result is worthless.

What a long run does is done: train, validate, save, draw. But for mixed precision and data workers.
"""
config = {
    'encoder': 'tu-resnet10t',
    'decoder_channels': [32, 24, 16, 12, 8],
    'image_size': 64,
    'num_epochs': 2,
    'use_amp': False,
    'num_workers': 0,                    # errors come from one process, with one traceback
}
