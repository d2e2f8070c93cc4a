"""To see in a minute whether code and data work; the result is worthless.

Everything a long run does is done once: train, validate, save, draw.
"""
config = {
    'encoder': 'tu-resnet10t',
    'decoder_channels': [32, 24, 16, 12, 8],
    'image_size': 64,
    'num_epochs': 2,
    'use_amp': False,
    'num_workers': 0,                    # errors come from one process, with one traceback
}
