"""For the final model, when time does not matter.

Costs: three to five times the default: a larger encoder, stronger augmentation, more epochs.
Add encoder_weights=imagenet for photographs (downloads once).
"""
config = {
    'encoder': 'resnet50',
    'decoder_channels': [256, 128, 64, 32, 16],
    'augment': 'strong',
    'num_epochs': 200,
    'early_stopping_patience': 40,
    'batch_size': 8,
    'accumulation_steps': 2,             # steadier gradients
}
