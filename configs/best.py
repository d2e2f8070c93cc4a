"""For the final model, when time does not matter.

Costs: many times the default: 200 epochs of a larger encoder with stronger augmentation.
Add encoder_weights=imagenet for photographs (downloads once).
"""
config = {
    'encoder': 'resnet50',
    'augment': 'strong',
    'num_epochs': 200,
    'early_stopping_patience': 40,
    'batch_size': 8,
    'accumulation_steps': 2,             # steadier gradients
}
